"""What ``CudaDevice`` does beside a round: times of its work, kernels of a caller's own."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from cuda.bindings import driver

from specrun.devices.cuda import CudaDevice
from specrun.errors import BackendError
from tests.gpu_simulator import gpus


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    device = CudaDevice(0)
    yield device
    gpus.forgive()
    device.close()


@pytest.mark.usefixtures("nothing_left")
def test_times_are_of_the_work_alone(device: CudaDevice) -> None:
    """Not of what was queued before, and not of the host."""
    small, large = device.zeros((4,), np.uint8), device.zeros((32 << 20,), np.uint8)
    device.wait()

    def clear_often() -> None:
        for _ in range(20):
            device.clear(large)

    recorded = device.capture(clear_often)
    long = device.seconds(recorded)
    recorded()
    short = device.seconds(lambda: device.clear(small))
    assert 0 < short < long / 20


@pytest.mark.usefixtures("nothing_left")
def test_work_that_fails_has_no_time(device: CudaDevice) -> None:
    def fail() -> None:
        raise ValueError("not this")

    with pytest.raises(BackendError, match="not this"):
        device.seconds(fail)
    with pytest.raises(BackendError, match="cannot"):
        device.capture(lambda: device.seconds(lambda: None))
    gpus.forgive()


def test_a_thread_that_has_no_gpu_yet_may_wait(device: CudaDevice) -> None:
    """The simulator has one current context for all threads; a new thread has none."""
    driver.cuCtxSetCurrent(0)
    device.wait()


def test_kernels_of_a_caller(device: CudaDevice) -> None:
    text = 'extern "C" __global__ void number(int* out, int n) { out[threadIdx.x] = n * threadIdx.x; }'
    device.add_kernels(text, {"number": 64})
    out = device.zeros((64,), np.int32)
    device.launch("number", (1, 1, 1), out, 3)
    mirror = device.pinned_like(out)
    device.copy_to_host(out, mirror)
    device.wait()
    assert mirror.tolist() == [3 * n for n in range(64)]
    with pytest.raises(BackendError, match="does not take kernels: "):
        device.add_kernels("not C++", {"number": 64})


def test_a_capture_reads_nothing_of_the_host(device: CudaDevice) -> None:
    """At a replay other bytes may lie there. What it writes goes to our own memory, or something reads it there."""
    there = device.zeros((4,), np.uint8)
    ours, foreign = device.pinned_like(there), np.zeros(4, np.uint8)
    other = CudaDevice(0)
    of_another = other.pinned_like(there)
    device.wait()
    device.capture(lambda: device.copy_to_host(there, ours))()
    to_device = device._driver.cuMemcpyHtoDAsync
    unified = device._driver.cuMemcpyAsync
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)
    device.capture(lambda: unified(ours.ctypes.data, there.address, 4, device.stream))()
    graph = captured_by_others(device, lambda: to_device(there.address, foreign.ctypes.data, 4, device.stream))
    for work in (
        lambda: to_device(there.address, ours.ctypes.data, 4, device.stream),
        lambda: to_device(there.address, foreign.ctypes.data, 4, device.stream),
        lambda: unified(there.address, ours.ctypes.data, 4, device.stream),
        lambda: unified(there.address, foreign.ctypes.data, 4, device.stream),
        lambda: unified(foreign.ctypes.data, there.address, 4, device.stream),
        lambda: device._driver.cuLaunchHostFunc(device.stream, address_of(call), 0),
        lambda: graph.launch(device._stream),
        lambda: device.copy_to_host(there, of_another),
    ):
        with pytest.raises(BackendError, match="part of it is computed on the host"):
            device.capture(work)
    device.wait()
    other.close()


def address_of(function: Any) -> int:
    """Of a function of ctypes."""
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def captured_by_others(device: CudaDevice, work: Callable[[], object]) -> Any:
    """A graph that a library has captured, without looking at what is in it."""
    builder = device._stream.create_graph_builder()
    builder.begin_building(mode="thread_local")
    work()
    builder.end_building()
    graph = builder.complete()
    builder.close()
    return graph


@pytest.mark.usefixtures("nothing_left")
def test_writes_wait_for_nobody(device: CudaDevice) -> None:
    """Values may change at once; only where a lot is queued, or at once, the host waits."""
    some, many = device.zeros((4,), np.int32), device.zeros((3 << 20,), np.int32)
    mirrors = [device.pinned_like(some), device.pinned_like(many)]
    device.wait()
    waits = gpus.calls("cuStreamSynchronize")
    for number in range(20):
        values = np.arange(4, dtype=np.int32) + number
        device.write(some, values)
        values[:] = -1
    assert gpus.calls("cuStreamSynchronize") == waits
    large = np.arange(3 << 20, dtype=np.int32)
    device.write(many, large)
    assert gpus.calls("cuStreamSynchronize") > waits
    for array, mirror in zip((some, many), mirrors, strict=True):
        device.copy_to_host(array, mirror)
    device.wait()
    assert mirrors[0].tolist() == [19, 20, 21, 22]
    assert (mirrors[1] == large).all()


def break_down(device: CudaDevice) -> None:
    """Work on memory that was freed: an error that CUDA gives back from then on."""
    array = device.zeros((4,), np.uint8)
    clear = device.capture(lambda: device.clear(array))
    device._driver.cuMemFree(array.address)
    device._memory.remove(array.address)
    clear()


def test_a_broken_device_is_known_and_closes() -> None:
    device, other = CudaDevice(0), CudaDevice(1)
    assert device.problem() is None
    break_down(device)
    with pytest.raises(BackendError, match="GPU 0 failed in a round"):
        device.wait()
    assert str(device.problem()).startswith("GPU 0 has failed: ")
    assert other.problem() is None
    device.close()
    gpus.forgive()
    other.close()
