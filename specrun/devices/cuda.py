"""A GPU through cuda-python: memory, kernels, and recorded work as CUDA graphs."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from specrun.devices import Device, DeviceArray, DeviceEvent, Grid
from specrun.devices.driver import why_no_gpu
from specrun.errors import BackendError
from specrun.optional_packages import how_to_install


def compile_kernels(arch: str, text: str, form: str = "cubin") -> Any:
    """Compile kernels for a GPU architecture such as ``sm_90`` with NVRTC, which needs no GPU: a cuda.core ObjectCode.

    form: ``cubin`` is machine code; ``ptx`` is had for an architecture such as ``compute_90``. Multiplications and
    additions are not fused, so that rounding is the host's.
    """
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(arch=arch, std="c++17", fma=False)
    return Program(text, "c++", options).compile(form)


class CudaDevice(Device):
    """See ``Device``. It knows the kernels that were added to it.

    Memory is the driver's own, visible to every stream; nothing is allocated in a round.
    """

    kind = "cuda"

    def __init__(self, number: int) -> None:
        """Raises BackendError without such a GPU, its driver or cuda-python."""
        if reason := why_no_gpu(number):
            raise BackendError(f"GPU {number}: {reason}")
        try:
            from cuda import core
            from cuda.bindings import driver
        except ImportError as error:
            raise BackendError(f"cuda-python is not installed ({error}): {how_to_install('cuda')}") from error
        self.number = number
        self._core, self._driver = core, driver
        with self._errors("cannot be opened"):
            self._device = core.Device(number)
            self.activate()
            self._stream = self._device.create_stream(options=core.StreamOptions(nonblocking=True))
            self.stream = int(self._stream.handle)
            self.name: str = self._device.name
            self.arch = f"sm_{self._device.arch}"
            self.multiprocessors = int(self._device.properties.multiprocessor_count)
        self._code: list[Any] = []
        self._kernels: dict[str, tuple[Any, int, bool]] = {}
        self._memory: list[int] = []
        self._pinned: list[Any] = []
        self._events: list[CudaEvent] = []
        self._timer: tuple[DeviceEvent, DeviceEvent] | None = None
        self._done: Any = None
        """The event that others wait for. One is enough: a wait is for what was recorded last before it."""

    def add_kernels(self, text: str, threads: Mapping[str, int], cooperative: Collection[str] = ()) -> None:
        """Compile ``text``, so that ``launch`` knows the kernels named in ``threads``, in blocks of so many threads.

        The blocks of ``cooperative`` kernels along the grid's third dimension wait for each other.
        """
        with self._errors("does not take kernels"):
            self.activate()
            code = compile_kernels(self.arch, text)
            self._code.append(code)
            self._kernels |= {
                name: (code.get_kernel(name), count, name in cooperative) for name, count in threads.items()
            }

    def free_memory(self) -> tuple[int, int]:
        """Free and total bytes of this GPU."""
        with self._errors("does not say how much memory it has"):
            self.activate()
            free, total = self._check(self._driver.cuMemGetInfo())
        return int(free), int(total)

    @override
    def activate(self) -> None:
        self._device.set_current()

    @override
    def zeros(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> DeviceArray:
        kind = np.dtype(dtype)
        size = max(1, math.prod(shape) * kind.itemsize)
        with self._errors(f"cannot allocate {size / 1e9:.2f} GB"):
            self.activate()
            address = int(self._check(self._driver.cuMemAlloc(size)))
            self._memory.append(address)
            self._check(self._driver.cuMemsetD8Async(address, 0, size, self.stream))
        return DeviceArray(address, shape, kind)  # The driver aligns to 256 bytes at least.

    @override
    def clear(self, array: DeviceArray) -> None:
        with self._errors("refused to clear memory"):
            self.activate()
            self._check(self._driver.cuMemsetD8Async(array.address, 0, array.nbytes, self.stream))

    @override
    def write(self, to: DeviceArray, values: npt.NDArray[Any]) -> None:
        values = np.ascontiguousarray(values, to.dtype)
        if values.nbytes != to.nbytes:
            raise ValueError(f"{values.nbytes} bytes for an array of {to.nbytes}")
        with self._errors("refused a copy"):
            self.activate()
            self._check(self._driver.cuMemcpyHtoDAsync(to.address, values.ctypes.data, to.nbytes, self.stream))
            self._stream.sync()

    @override
    def pinned_like(self, array: DeviceArray) -> npt.NDArray[Any]:
        with self._errors("cannot pin host memory"):
            self.activate()
            memory = self._core.LegacyPinnedMemoryResource().allocate(array.nbytes)
        self._pinned.append(memory)
        raw = (ctypes.c_uint8 * array.nbytes).from_address(int(memory.handle))
        return np.ctypeslib.as_array(raw).view(array.dtype).reshape(array.shape)

    @override
    def copy_to_host(self, array: DeviceArray, pinned: npt.NDArray[Any]) -> None:
        with self._errors("refused a copy"):
            self.activate()
            to = pinned.ctypes.data
            self._check(self._driver.cuMemcpyDtoHAsync(to, array.address, array.nbytes, self.stream))

    @override
    def copy(self, to: DeviceArray, source: DeviceArray) -> None:
        """Between GPUs directly with peer access, else as the driver does it."""
        if to.nbytes != source.nbytes:
            raise ValueError(f"{source.nbytes} bytes for an array of {to.nbytes}")
        with self._errors("refused a copy"):
            self.activate()
            self._check(self._driver.cuMemcpyAsync(to.address, source.address, to.nbytes, self.stream))

    @override
    def launch(self, kernel: str, grid: Grid, *arguments: DeviceArray | int) -> None:
        values = [value.address if isinstance(value, DeviceArray) else np.int32(value) for value in arguments]
        code, threads, cooperative = self._kernels[kernel]
        with self._errors(f"refused the kernel {kernel}"):
            self.activate()
            together = cooperative and grid[2] > 1
            config = self._core.LaunchConfig(grid=grid, block=threads, is_cooperative=together)
            self._core.launch(self._stream, config, code, *values)

    @override
    def capture(self, work: Callable[[], object]) -> Callable[[], None]:
        """A CUDA graph."""
        with self._errors("cannot record a round"):
            self.activate()
            builder = self._stream.create_graph_builder()
            try:
                builder.begin_building(mode="thread_local")
                work()
                self._require_no_foreign_copies()
                builder.end_building()
                graph = builder.complete()
            except BaseException:
                _close_quietly(builder)  # Ends a capture that is still open; one that failed complains again.
                raise
        builder.close()

        def replay() -> None:
            with self._errors("refused a recorded round"):
                self.activate()
                graph.launch(self._stream)

        return replay

    def _require_no_foreign_copies(self) -> None:
        """Raise BackendError where what is being captured copies from the host, or to memory that is not ours.

        Somebody computes with such bytes on the host, which no replay does again.
        """
        driver = self._driver
        graph = self._check(driver.cuStreamGetCaptureInfo(self.stream))[2]
        _, count = self._check(driver.cuGraphGetNodes(graph))
        nodes, _ = self._check(driver.cuGraphGetNodes(graph, count))
        host = driver.CUmemorytype.CU_MEMORYTYPE_HOST
        for node in nodes:
            if self._check(driver.cuGraphNodeGetType(node)) == driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMCPY:
                copy = self._check(driver.cuGraphMemcpyNodeGetParams(node))
                if copy.srcMemoryType == host or (copy.dstMemoryType == host and not self._is_pinned(copy.dstHost)):
                    raise BackendError("part of it is computed on the host")

    def _is_pinned(self, address: int) -> bool:
        return any(0 <= address - int(memory.handle) < memory.size for memory in self._pinned)

    @override
    def event(self) -> DeviceEvent:
        with self._errors("refused an event"):
            self.activate()
            event = CudaEvent(self, self._device.create_event(self._core.EventOptions(timing_enabled=True)))
        self._events.append(event)
        return event

    @override
    def seconds(self, work: Callable[[], object]) -> float:
        with self._errors("cannot time its work"):
            before, after = self._timer = self._timer or (self.event(), self.event())
            self._stream.sync()
            before.record()
            work()
            after.record()
            after.wait()
            return after.seconds_since(before)

    @override
    def wait_for(self, other: Device) -> None:
        if not isinstance(other, CudaDevice):
            raise ValueError(f"a GPU cannot wait for a {other.kind} device")
        with self._errors("cannot wait for another GPU"):
            other.activate()
            other._done = other._stream.record(other._done)
            self.activate()
            self._stream.wait(other._done)

    def enable_peer_access(self, other: CudaDevice) -> bool:
        """Let this GPU read and write the other's memory directly; False where the hardware does not allow it."""
        with self._errors("does not say whether it reaches another GPU"):
            if not self._device.can_access_peer(other.number):
                return False
            self.activate()
            code = int(self._driver.cuCtxEnablePeerAccess(other._device.context.handle, 0)[0])
        return code in (0, int(self._driver.CUresult.CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED))

    @override
    def wait(self) -> None:
        with self._errors("failed in a round"):
            self.activate()
            self._stream.sync()

    @override
    def close(self) -> None:
        """Whatever uses this device must have been closed before."""
        self.activate()
        for address in self._memory:
            self._driver.cuMemFree(address)
        self._memory.clear()
        self._pinned.clear()
        for event in self._events:
            event.event.close()
        if self._done is not None:
            self._done.close()
            self._done = None
        self._stream.close()

    def _check(self, result: tuple[Any, ...]) -> Any:
        """The values behind the driver's error code."""
        code, *values = result
        if int(code) != 0:
            raise RuntimeError(getattr(code, "name", str(code)))
        return values[0] if len(values) == 1 else values

    @contextmanager
    def _errors(self, what: str) -> Iterator[None]:
        """cuda-python's many exceptions as one of ours, in one line."""
        try:
            yield
        except BackendError:
            raise
        except Exception as error:
            reason = " ".join(str(error).split()) or type(error).__name__
            raise BackendError(f"GPU {self.number} {what}: {reason}") from error


class CudaEvent(DeviceEvent):
    """See ``DeviceEvent``. Made by ``CudaDevice.event``."""

    def __init__(self, device: CudaDevice, event: Any) -> None:
        self._device = device
        self.event = event

    @override
    def record(self) -> None:
        with self._device._errors("refused an event"):
            self._device.activate()
            self._device._stream.record(self.event)

    @override
    def wait(self) -> None:
        with self._device._errors("failed in a round"):
            self._device.activate()
            self.event.sync()

    @override
    def seconds_since(self, earlier: DeviceEvent) -> float:
        if not isinstance(earlier, CudaEvent):
            raise ValueError("an event of another kind of device")
        with self._device._errors("does not tell a time"):
            return float(self.event - earlier.event) / 1e3


def _close_quietly(builder: Any) -> None:
    try:
        builder.close()
    except Exception:
        return
