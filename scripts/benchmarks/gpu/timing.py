"""Times on the device: between events, around work that is queued as one piece.

A host that launches kernels one by one needs longer for a launch than many kernels take; a recorded graph shows what
the device takes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from specrun.decoder import SpeculativeDecoder
from specrun.devices import Device
from specrun.devices.cuda import CudaDevice
from specrun.gpu.round import DeviceRound

CALLS = 50
"""Calls in a recorded graph, of short ones."""
_LONGEST = 0.1
"""Seconds that a graph may take; of long calls it has fewer."""
_REPLAYS = 5


def mean_seconds(device: Device, work: Callable[[], object], capturable: bool = True, calls: int = CALLS) -> float:
    """What one ``work`` takes: the median of several runs of ``calls`` at most, recorded unless told otherwise."""

    def repeat(count: int) -> None:
        for _ in range(count):
            work()

    once = min(device.seconds(lambda: repeat(1)) for _ in range(2))  # The first may load and compile.
    count = max(1, min(calls, int(_LONGEST / max(once, 1e-9))))

    replay = device.capture(lambda: repeat(count)) if capturable else lambda: repeat(count)
    device.seconds(replay)
    return statistics.median(device.seconds(replay) for _ in range(_REPLAYS)) / count


def count_nodes(device: CudaDevice, work: Callable[[], object]) -> int:
    """Nodes of the graph that a recording of ``work`` is. Raises RuntimeError."""
    from cuda.bindings import driver

    def checked(result: tuple[Any, ...]) -> Any:
        if int(result[0]) != 0:
            raise RuntimeError(f"the work was not recorded: {result[0]}")
        return result[-1]

    device.activate()
    checked(driver.cuStreamBeginCapture(device.stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL))
    try:
        work()
    finally:
        graph = checked(driver.cuStreamEndCapture(device.stream))
    try:
        return int(checked(driver.cuGraphGetNodes(graph)))
    finally:
        driver.cuGraphDestroy(graph)


_READ = """
extern "C" __global__ void read_all(const uint4* from, int count, unsigned* out) {
  unsigned found = 0;
  #pragma unroll 8
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {
    const uint4 four = from[i];
    found ^= four.x ^ four.y ^ four.z ^ four.w;
  }
  if (found == 1) *out = found;  // So that nothing is left out.
}
"""
_THREADS, _BLOCKS = 512, 4


def read_bandwidth(device: CudaDevice, size: int) -> float:
    """Bytes a second at which a kernel reads ``size`` bytes of the device's memory, as products read weights."""
    device.add_kernels(_READ, {"read_all": _THREADS})
    there, out = device.zeros((size,), np.uint8), device.zeros((1,), np.uint32)
    grid = (_BLOCKS * device.multiprocessors, 1, 1)
    return size / mean_seconds(device, lambda: device.launch("read_all", grid, there, size // 16, out))


class Replays:
    """The times of a device's recorded rounds, while ``timed``."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.are_timed = False

    @contextmanager
    def timed(self) -> Iterator[list[float]]:
        """The times of the rounds inside, as they come. A timed round is waited for, before and after it."""
        self.seconds, self.are_timed = [], True
        try:
            yield self.seconds
        finally:
            self.are_timed = False


def watch_replays(device: Device) -> Replays:
    """Let what ``device`` records from now on be timed when it is wanted."""
    own, replays = device.capture, Replays()

    def record(work: Callable[[], object]) -> Callable[[], None]:
        replay = own(work)

        def run() -> None:
            if replays.are_timed:
                replays.seconds.append(device.seconds(replay))
            else:
                replay()

        return run

    device.capture = record  # type: ignore[method-assign]
    return replays


def cuda_device(decoder: SpeculativeDecoder) -> CudaDevice:
    """The GPU of a decoder's target. Raises TypeError where it has none."""
    rounds = decoder.scheduler.round
    if not isinstance(rounds, DeviceRound) or not isinstance(rounds.device, CudaDevice):
        raise TypeError("these engines do not run on a GPU")
    return rounds.device
