"""The kernels' host build behind the ``Device`` protocol: a round's real arithmetic without a GPU.

Work is done when it is queued; ``capture`` keeps what was queued and does it again. Not a stand-in for CUDA's
behaviour, only for its arithmetic and for the order of what a round queues.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import itertools
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from specrun.devices import Device, DeviceArray, DeviceEvent, Grid
from specrun.gpu import kernels
from specrun.gpu.kernels import calls
from specrun.gpu.kernels.layout import BARRIER

CACHE = Path(__file__).parents[2] / ".cache" / "kernels"


@functools.cache
def host_kernels() -> ctypes.CDLL:
    """``round.cu`` as a shared library, compiled by the host's C++ compiler; with SPECRUN_TEST_CXXFLAGS, if set."""
    source = kernels.source()
    flags = ["-std=c++20", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    flags += os.environ.get("SPECRUN_TEST_CXXFLAGS", "").split()
    name = hashlib.sha256("\n".join([*flags, source]).encode()).hexdigest()[:16]
    library = CACHE / f"round-{name}.so"
    if not library.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        unfinished = library.with_suffix(f".{os.getpid()}")  # Others may be compiling it too.
        command = ["c++", *flags, "-x", "c++", "-", "-o"]
        subprocess.run([*command, str(unfinished)], input=source, text=True, check=True)
        unfinished.replace(library)
    return ctypes.CDLL(str(library))


@functools.cache
def kernel_device() -> Device:
    """Where kernels are tested: the host build, or with SPECRUN_TEST_DEVICE=cuda the first GPU (gpu_check.py)."""
    if os.environ.get("SPECRUN_TEST_DEVICE") == "cuda":
        return kernels.open_gpu(0)
    return HostDevice(threads=5)  # More than one, so that they have to work together; no power of 2.


blocks_per_group = 1


def call(
    function: Callable[..., None],
    rows: Mapping[str, npt.NDArray[Any]] | None = None,
    **arguments: npt.NDArray[Any] | int,
) -> None:
    """Run a kernel by its ``function`` on numpy arrays, which afterwards hold what it wrote.

    rows: what the kernel needs of a ``RowState``. Thread groups have ``blocks_per_group`` blocks.
    """
    device = kernel_device()
    sent: list[tuple[npt.NDArray[Any], DeviceArray]] = []

    def send(value: npt.NDArray[Any] | int) -> DeviceArray | int:
        if isinstance(value, int):
            return value
        array = device.zeros(value.shape, value.dtype)
        device.write(array, value)
        sent.append((value, array))
        return array

    given = {name: send(value) for name, value in arguments.items()}
    if rows is None:
        function(device, **given)
    else:
        barriers = device.zeros((64,), BARRIER)
        state = SimpleNamespace(device=device, barriers=barriers, **{name: send(value) for name, value in rows.items()})
        with patch.object(calls, "blocks_per_group", lambda *_: blocks_per_group):
            function(state, **given)
        assert not fetched(device, barriers).tobytes().strip(b"\0"), "the thread groups leave something behind"
    for value, array in sent:
        value[...] = fetched(device, array)


def fetched(device: Device, array: DeviceArray) -> npt.NDArray[Any]:
    """What ``array`` holds."""
    mirror = device.pinned_like(array)
    device.copy_to_host(array, mirror)
    device.wait()
    return mirror


class HostEvent:
    """A moment of the host's clock."""

    when = 0.0

    def record(self) -> None:
        self.when = time.perf_counter()

    def wait(self) -> None:
        pass

    def seconds_since(self, earlier: DeviceEvent) -> float:
        assert isinstance(earlier, HostEvent)
        return self.when - earlier.when


class HostDevice:
    """The host's memory as a device, whose work is done at once."""

    kind = "cpu"
    number = 0
    stream = 0
    multiprocessors = 1

    def __init__(self, threads: int = 1) -> None:
        self.threads = threads
        """Of a block."""
        self._memory: list[npt.NDArray[Any]] = []
        self._recording: list[Callable[[], object]] | None = None
        self.launched: list[str] = []

    def queue(self, work: Callable[[], object]) -> None:
        """Do ``work`` now, or when the recording is played."""
        if self._recording is None:
            work()
        else:
            self._recording.append(work)

    def activate(self) -> None:
        pass

    def clear(self, array: DeviceArray) -> None:
        self.queue(lambda: ctypes.memset(array.address, 0, array.nbytes))

    def zeros(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> DeviceArray:
        assert self._recording is None, "memory must not be allocated while recording"
        memory = np.zeros(shape, dtype)
        self._memory.append(memory)
        return DeviceArray(memory.ctypes.data, memory.shape, memory.dtype)

    def write(self, to: DeviceArray, values: npt.NDArray[Any]) -> None:
        assert self._recording is None, "the host must not write while recording"
        values = np.ascontiguousarray(values, to.dtype)
        assert values.nbytes == to.nbytes
        ctypes.memmove(to.address, values.ctypes.data, to.nbytes)

    def pinned_like(self, array: DeviceArray) -> npt.NDArray[Any]:
        return np.zeros(array.shape, array.dtype)

    def copy_to_host(self, array: DeviceArray, mirror: npt.NDArray[Any]) -> None:
        self.queue(lambda: ctypes.memmove(mirror.ctypes.data, array.address, array.nbytes))

    def copy(self, to: DeviceArray, source: DeviceArray) -> None:
        assert to.nbytes == source.nbytes
        self.queue(lambda: ctypes.memmove(to.address, source.address, to.nbytes))

    def launch(self, kernel: str, grid: Grid, *arguments: DeviceArray | int) -> None:
        library = host_kernels()
        function = library[kernel]
        values = [
            ctypes.c_void_p(value.address) if isinstance(value, DeviceArray) else ctypes.c_int(value)
            for value in arguments
        ]

        threads = min(self.threads, kernels.THREADS[kernel])

        def walk(thread: int) -> None:
            library.set_thread(thread)
            for block in itertools.product(*map(range, grid)):
                library.set_block(*block)
                function(*values)

        def work() -> None:
            self.launched.append(kernel)
            library.set_launch(threads, *grid)
            others = [Thread(target=walk, args=(thread,)) for thread in range(1, threads)]
            for other in others:
                other.start()
            walk(0)
            for other in others:
                other.join()

        self.queue(work)

    def capture(self, work: Callable[[], object]) -> Callable[[], None]:
        steps: list[Callable[[], object]] = []
        self._recording = steps
        try:
            work()
        finally:
            self._recording = None

        def play() -> None:
            for step in steps:
                step()

        return play

    def event(self) -> DeviceEvent:
        return HostEvent()

    def seconds(self, work: Callable[[], object]) -> float:
        began = time.perf_counter()
        work()
        return time.perf_counter() - began

    def wait_for(self, other: Device) -> None:
        pass

    def wait(self) -> None:
        pass

    def problem(self) -> str | None:
        return None

    def close(self) -> None:
        self._memory.clear()
