"""Every rule that the simulated GPUs hold their users to: what breaks it is found, and named."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.devices import DeviceArray
from specrun.devices.cuda import CudaDevice
from specrun.errors import BackendError
from specrun.gpu import kernels
from specrun.gpu.trt import TrtBackend
from specrun.request.request import Request
from specrun.sampling.sampler import SamplingParams
from tests.gpu_simulator import gpus, ptx
from tests.gpu_simulator.rules import breaks
from tests.gpu_simulator.tensorrt import ExecutionContext, as_plan
from tests.helpers.tables import decode, normal, save_table_engine


@pytest.fixture
def device() -> Iterator[CudaDevice]:
    device = kernels.open_gpu(0)
    yield device
    gpus.forgive()
    device.close()


def run(device: CudaDevice, source: str, threads: int, *arguments: DeviceArray | int, blocks: int = 1) -> None:
    """Compile a kernel ``k`` and wait until it has run."""
    device.add_kernels(source, {"k": threads})
    device.launch("k", (blocks, 1, 1), *arguments)
    device.wait()


@dataclass(frozen=True)
class Broken:
    """A kernel, how many threads run it, and what is wrong with it."""

    body: str
    rule: str
    threads: int = 64
    head: str = "int* out"


MEET = "__shared__ int parts[64]; "
KERNELS = {
    "beyond its memory": Broken("out[threadIdx.x] = 1;", "4 bytes at .* belong to no allocation"),
    "not aligned": Broken("*(int*)((char*)out + 2) = 1;", "is not aligned to 4"),
    "a barrier that some miss": Broken(
        "if (threadIdx.x < 3) __syncthreads(); else while (*(volatile int*)out == 0);", "deadlock"
    ),
    "two barriers for one": Broken(
        "if (threadIdx.x < 3) { __syncthreads(); out[0] = 1; } else { __syncthreads(); out[1] = 2; }",
        "another barrier than others wait at",
    ),
    "a removed barrier": Broken(
        MEET + "parts[threadIdx.x] = threadIdx.x; out[0] = parts[63 - threadIdx.x];", "a race in shared memory"
    ),
    "a lane that is missed": Broken(
        "if (threadIdx.x % 32 != 5) out[0] = __shfl_xor_sync(~0u, threadIdx.x, 1);", "a lane that has ended|wait for it"
    ),
}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("forward", [True, False])
def test_kernels(device: CudaDevice, name: str, forward: bool) -> None:
    broken = KERNELS[name]
    out = device.zeros((16,), np.int32)
    source = f'extern "C" __global__ void k({broken.head}) {{ {broken.body} }}'
    with pytest.raises(BackendError, match="failed in a round"):
        if forward:
            run(device, source, broken.threads, out)
        else:
            with gpus.backwards():
                run(device, source, broken.threads, out)
    breaks(broken.rule)


def test_what_is_right_breaks_nothing(device: CudaDevice) -> None:
    """The controls of the kernels above."""
    out = device.zeros((64,), np.int32)
    body = MEET + (
        "int lane = __shfl_xor_sync(~0u, threadIdx.x, 1); parts[threadIdx.x] = lane; __syncthreads(); "
        "out[threadIdx.x] = parts[63 - threadIdx.x];"
    )
    source = f'extern "C" __global__ void k(int* out) {{ {body} }}'
    run(device, source, 64, out)
    with gpus.backwards():
        run(device, source, 64, out)
    mirror = device.pinned_like(out)
    device.copy_to_host(out, mirror)
    device.wait()
    assert mirror.tolist() == [(63 - n) ^ 1 for n in range(64)]
    assert gpus.violations() == []


def test_memory_of_another_gpu(device: CudaDevice) -> None:
    other = CudaDevice(1)
    there = other.zeros((4,), np.int32)
    device.activate()
    source = 'extern "C" __global__ void k(int* out) { out[0] = 7; }'
    with pytest.raises(BackendError):
        run(device, source, 1, there)
    breaks("memory of GPU 1 without peer access")
    device.enable_peer_access(other)
    device.activate()
    run(device, source, 1, there)
    other.close()


def test_a_kernel_that_takes_other_arguments(device: CudaDevice) -> None:
    out = device.zeros((1 << 20,), np.uint16)
    device.launch("swap", (1, 1, 1), out, out, 8)
    device.wait()
    assert gpus.violations() == []
    for wrong in ((out, out, 8, 8), (8, out, 8), (out, out)):
        device.launch("swap", (1, 1, 1), *wrong)
        breaks("for a kernel that takes")


def test_ptx_that_is_not_known() -> None:
    text = ".version 9.0\n.visible .entry k(\n)\n{\n\ttex.2d.v4.s32.f32 {%r1}, [a];\n}\n"
    with pytest.raises(ptx.PtxError, match=r"line 5: tex\.2d.* not simulated"):
        ptx.kernels(text)


def test_work_waits_until_it_is_waited_for(device: CudaDevice) -> None:
    array = device.zeros((4,), np.int32)
    mirror = device.pinned_like(array)
    device.wait()
    mirror[:] = 5
    device.copy_to_host(array, mirror)
    assert mirror.tolist() == [5] * 4
    device.wait()
    assert mirror.tolist() == [0] * 4


def test_an_event_is_waited_for_and_nothing_behind_it(device: CudaDevice) -> None:
    """But work may run earlier, at any time after it was queued."""
    array, event = device.zeros((4,), np.int32), device.event()
    mirrors = [device.pinned_like(array) for _ in range(2)]
    device.wait()

    def copied() -> list[bool]:
        for mirror in mirrors:
            mirror[:] = 5
        device.copy_to_host(array, mirrors[0])
        event.record()
        device.copy_to_host(array, mirrors[1])
        event.wait()
        return [not mirror.any() for mirror in mirrors]

    assert copied() == [True, False]
    with gpus.eager():
        assert copied() == [True, True]


def test_times_of_events_that_take_none(device: CudaDevice) -> None:
    driver, flag = device._driver, device._driver.CUevent_flags.CU_EVENT_DISABLE_TIMING
    events = [device._check(driver.cuEventCreate(flag)) for _ in range(2)]
    for event in events:
        device._check(driver.cuEventRecord(event, device.stream))
    device.wait()
    assert int(driver.cuEventElapsedTime(*events)[0]) != 0
    breaks("an event that takes no times")
    for event in events:
        driver.cuEventDestroy(event)


def test_memory_that_is_not_pinned_or_not_there(device: CudaDevice) -> None:
    array = device.zeros((4,), np.int32)
    with pytest.raises(BackendError, match="refused a copy"):
        device.copy_to_host(array, np.zeros(4, np.int32))
    breaks("cuMemcpyDtoHAsync_v2: to memory that is not pinned")
    works: tuple[Callable[[], object], ...] = (
        lambda: device.clear(DeviceArray(array.address, (1 << 20,), np.dtype(np.int32))),
        lambda: device.copy(array, DeviceArray(array.address + 8, (4,), np.dtype(np.int32))),
        lambda: device.write(DeviceArray(64, (4,), np.dtype(np.int32)), np.zeros(4)),
    )
    for work in works:
        with pytest.raises(BackendError):
            work()
        breaks("memory that is not allocated")


def test_memory_is_not_used_after_it_was_freed(device: CudaDevice) -> None:
    array, mirror = device.zeros((4,), np.int32), device.pinned_like(device.zeros((4,), np.int32))
    device.wait()
    replay = device.capture(lambda: device.copy_to_host(array, mirror))
    device._check(device._driver.cuMemFree(array.address))
    device._memory.remove(array.address)
    replay()
    with pytest.raises(BackendError):
        device.wait()
    breaks("16 bytes of memory that is not allocated, or not any more")
    assert int(device._driver.cuMemFree(array.address)[0]) != 0
    breaks("nothing allocated begins here")


@pytest.mark.parametrize(
    "call",
    [
        lambda device: device.wait(),
        lambda device: device.zeros((4,), np.int32),
        lambda device: device.pinned_like(DeviceArray(0, (4,), np.dtype(np.int32))),
        lambda device: device.write(device._kept, np.zeros(4)),
    ],
    ids=["wait", "zeros", "mirror", "write"],
)
def test_what_a_capture_forbids(device: CudaDevice, call: Callable[[Any], object]) -> None:
    device._kept = device.zeros((4,), np.int32)  # type: ignore[attr-defined]
    device.wait()
    with pytest.raises(BackendError, match=r"cannot|failed|refused"):
        device.capture(lambda: call(device))
    breaks("not allowed while a stream is captured")
    # What broke off a capture leaves none behind.
    device.wait()
    device.capture(lambda: device.clear(device._kept))()  # type: ignore[attr-defined]
    device.wait()


def test_a_capture_that_waits_for_another_gpu(device: CudaDevice) -> None:
    other = CudaDevice(1)
    with pytest.raises(BackendError):
        device.capture(lambda: device.wait_for(other))
    breaks("must not wait for what is outside of its capture")
    other.close()


def test_streams_wait_for_each_other(device: CudaDevice) -> None:
    """Without ``wait_for`` the other GPU's work has not run; with it, it has."""
    other = CudaDevice(1)
    source, to = other.zeros((4,), np.int32), device.zeros((4,), np.int32)
    mirror = device.pinned_like(to)
    for follows in (False, True):
        other._check(other._driver.cuMemsetD8Async(source.address, 1, 16, other.stream))
        if follows:
            device.wait_for(other)
        device.copy(to, source)
        device.copy_to_host(to, mirror)
        device.wait()
        assert (mirror[0] == 0x01010101) == follows
        other._check(other._driver.cuMemsetD8Async(source.address, 0, 16, other.stream))
        if not follows:
            assert mirror[0] != 0x01010101
            other.wait()
    other.close()


def test_a_host_function_calls_no_cuda(device: CudaDevice) -> None:
    def call(_: int | None) -> None:
        device._driver.cuMemGetInfo()

    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(call)
    gpus.library().cuLaunchHostFunc(ctypes.c_void_p(device.stream), function, None)
    device.wait()
    breaks("a host function must not call CUDA")


# --------------------------------------------------------------------------------------------------------- TensorRT


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pair")
    sizes: dict[str, Any] = {"max_batch_size": 2, "max_input_len": 32, "max_seq_len": 117}
    sizes |= {"cache_length": 128, "max_draft_len": 3}
    table = normal(1, 24, 24, scale=2.0)
    for name, logits in (("target", table), ("draft", table + normal(2, 24, 24, scale=0.3))):
        as_plan(save_table_engine(root / "cpu" / name, logits, weight=5, **sizes), root / name)
    return root


def generate(pair: Path, **config: Any) -> list[int]:
    with SpeculativeDecoder.open(pair / "target", pair / "draft", DraftTargetConfig(3, **config)) as decoder:
        return decode(decoder, [Request([1, 2, 3], SamplingParams(), 20)])[0]


MISTAKES: dict[str, tuple[Any, str, Callable[[Any], Any], str]] = {
    # Past and present apart: the present of each cache one row further.
    "a wrong alias": (
        ExecutionContext,
        "set_tensor_address",
        lambda own: lambda self, name, address: own(self, name, address + 512 * name.startswith("present")),
        "must be where past_key_values.0.key is",
    ),
    "a tensor that ends behind its memory": (
        ExecutionContext,
        "set_tensor_address",
        lambda own: lambda self, name, address: own(self, name, address + (1 << 16) * (name == "logits")),
        "logits, of .* bytes, which end behind their allocation",
    ),
    "an address between two multiples": (
        ExecutionContext,
        "set_tensor_address",
        lambda own: lambda self, name, address: own(self, name, address + 64),
        "not a multiple of 256",
    ),
    "an output in the memory of an input": (
        ExecutionContext,
        "set_tensor_address",
        lambda own: lambda self, name, to: own(self, name, self._addresses["input_ids"] if name == "logits" else to),
        "logits, which lies in the memory of input_ids",
    ),
    "a workspace that is too small": (
        ExecutionContext,
        "set_device_memory",
        lambda own: lambda self, memory, size: own(self, memory, size // 2),
        "its workspace, which is missing, too small or not aligned",
    ),
    "a profile that is not waited for": (
        CudaDevice,
        "wait",
        lambda own: lambda self: None,
        "before the switch of profiles was waited for",
    ),
    "a shape beyond its profile": (
        ExecutionContext,
        "set_input_shape",
        lambda own: (
            lambda self, name, shape: own(self, name, (shape[0], shape[1] + 99) if name == "input_ids" else shape)
        ),
        "which is not within",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_with_tensorrt(pair: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    owner, method, change, rule = MISTAKES[name]
    monkeypatch.setattr(owner, method, change(getattr(owner, method)))
    with pytest.raises(BackendError, match="refused"):
        generate(pair, warm_up=False)
    breaks(rule)


def test_a_shape_is_not_captured_before_it_has_run(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round that is recorded the first time has contexts that were not warmed up; pieces go on."""
    from specrun.gpu.captures import Captures

    expected = generate(pair)
    own = Captures.queue

    def eager(self: Captures, device: Any, key: Any, work: Any) -> bool:
        self._seen.add(key)
        return own(self, device, key, work)

    monkeypatch.setattr(Captures, "queue", eager)
    with pytest.warns(UserWarning, match="cannot be captured"):
        assert generate(pair) == expected
    breaks("the capture of a shape that this context has not run before|a switch of profiles in a capture")


def test_a_wait_that_is_removed_shows(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host reads what the round before wrote."""
    from specrun.gpu.records import QueuedRound

    expected = generate(pair)
    monkeypatch.setattr(QueuedRound, "wait", lambda self: None)
    monkeypatch.setattr(QueuedRound, "seconds", 0.0)  # Of an event that was not reached there is no time.
    assert generate(pair) != expected


def test_positions_behind_the_cache(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = CudaDevice(0)
    from specrun.engine_dir.config import open_engine
    from specrun.gpu.backend import Feed

    backend = TrtBackend(pair / "target", open_engine(pair / "target"), device, "9.0")
    backend.allocate_cache()
    feed = Feed(*(device.zeros(shape, np.int64) for shape in ((1, 4), (1,), (1, 1))))
    device.write(feed.write_indices, np.array([125]))
    backend.enqueue(feed, device.zeros((1, 1, 24), np.float32), 0, fixed=True)
    device.wait()
    breaks(r"4 tokens at \[125\] of 128")
    backend.close()
    device.close()


def test_owners_outlive_what_was_made_from_them(pair: Path) -> None:
    from tests.gpu_simulator import tensorrt

    device = CudaDevice(0)
    device.activate()
    log = tensorrt.ILogger()
    runtime = tensorrt.Runtime(log)
    engine = runtime.deserialize_cuda_engine((pair / "target" / "rank0.engine").read_bytes())
    assert engine is not None
    config = engine.create_runtime_config()
    context = engine.create_execution_context(runtime_config=config)
    del config
    gc.collect()
    breaks("a runtime configuration went before a context")
    del runtime
    gc.collect()
    breaks("a runtime went before an engine")
    del engine
    gc.collect()
    breaks("an engine went before a context")
    del context
    device.close()


def test_what_is_not_given_back_is_counted() -> None:
    before = gpus.alive()
    device = CudaDevice(0)
    device.pinned_like(device.zeros((4,), np.int32))
    made = gpus.alive()
    assert (made.memory, made.pinned, made.streams) == (before.memory + 1, before.pinned + 1, before.streams + 1)
    device.close()
    del device
    gc.collect()
    assert gpus.alive() == before


def test_kernels_have_every_thread() -> None:
    assert max(kernels.THREADS.values()) == 1024
