"""A GPU through cuda-python: memory, kernels, and recorded work as CUDA graphs."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from specrun.devices import Device, DeviceArray, DeviceEvent, Grid
from specrun.devices.driver import why_no_gpu
from specrun.errors import BackendError
from specrun.optional_packages import how_to_install

_STAGING_BYTES = 4 << 20
"""Pinned memory through which the host's numbers pass, so that a copy of them need not be waited for."""


def compile_kernels(arch: str, text: str, form: str = "cubin") -> Any:
    """Compile kernels for a GPU architecture such as ``sm_90`` with NVRTC, which needs no GPU: a cuda.core ObjectCode.

    form: ``cubin`` is machine code; ``ptx`` is had for an architecture such as ``compute_90``. Multiplications and
    additions are not fused, so that rounding is the host's.
    """
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(arch=arch, std="c++17", fma=False)
    return Program(text, "c++", options).compile(form)


class CudaDevice(Device):
    """A GPU through NVIDIA's driver, with the kernels that were added to it.

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
        self._staging: npt.NDArray[np.uint8] | None = None
        self._staged = 0
        """Bytes of ``_staging`` that queued copies may not have read yet."""
        self._events: list[CudaEvent] = []
        self._timer: tuple[DeviceEvent, DeviceEvent] | None = None
        self._done: Any = None
        """The event that others wait for. One is enough: a wait is for what was recorded last before it."""

    def add_kernels(
        self, text: str, threads: Mapping[str, int], cooperative: Collection[str] = (), prefix: str = ""
    ) -> None:
        """Compile ``text``, so that ``launch`` knows the kernels named in ``threads``, in blocks of so many threads.

        The blocks of ``cooperative`` kernels along the grid's third dimension wait for each other. prefix: of the names
        that ``launch`` knows.
        """
        with self._errors("does not take kernels"):
            self.activate()
            code = compile_kernels(self.arch, text)
            self._code.append(code)
            self._kernels |= {
                prefix + name: (code.get_kernel(name), count, name in cooperative) for name, count in threads.items()
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
        content, first = values.reshape(-1).view(np.uint8), 0
        while first < len(content):
            part = content[first : first + _STAGING_BYTES]
            staged = self._stage(part)
            with self._errors("refused a copy"):
                self.activate()
                self._check(
                    self._driver.cuMemcpyHtoDAsync(to.address + first, staged.ctypes.data, len(part), self.stream)
                )
            first += len(part)

    def _stage(self, content: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        """A copy of ``content`` in pinned memory. Waits only where that memory is full of copies that are queued."""
        if self._staging is None:
            self._staging = self.pinned_like(DeviceArray(0, (_STAGING_BYTES,), np.dtype(np.uint8)))
        if self._staged + len(content) > _STAGING_BYTES:
            self.wait()
        staged = self._staging[self._staged : self._staged + len(content)]
        staged[:] = content
        self._staged += len(content)
        return staged

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
                self._require_replayable(self._check(self._driver.cuStreamGetCaptureInfo(self.stream))[2])
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

    def _require_replayable(self, graph: Any) -> None:
        """Raise BackendError where ``graph`` calls the host, copies from it, or copies to memory that is not ours.

        The host computes with such bytes, and a replay does not repeat that.
        """
        driver = self._driver
        kinds = driver.CUgraphNodeType
        _, count = self._check(driver.cuGraphGetNodes(graph))
        nodes, _ = self._check(driver.cuGraphGetNodes(graph, count))
        for node in nodes:
            kind, is_foreign = self._check(driver.cuGraphNodeGetType(node)), False
            if kind == kinds.CU_GRAPH_NODE_TYPE_GRAPH:
                self._require_replayable(self._check(driver.cuGraphChildGraphNodeGetGraph(node)))
            elif kind == kinds.CU_GRAPH_NODE_TYPE_MEMCPY:
                copy = self._check(driver.cuGraphMemcpyNodeGetParams(node))
                source = self._host_address(copy.srcMemoryType, copy.srcHost, copy.srcDevice)
                to = self._host_address(copy.dstMemoryType, copy.dstHost, copy.dstDevice)
                is_foreign = source is not None or (to is not None and not self._is_pinned(to))
            if is_foreign or kind == kinds.CU_GRAPH_NODE_TYPE_HOST:
                raise BackendError("part of it is computed on the host")

    def _host_address(self, kind: Any, host: Any, unified: Any) -> int | None:
        """Where an end of a copy lies on the host; None: it lies on a GPU. unified: of either kind."""
        kinds, attribute = self._driver.CUmemorytype, self._driver.CUpointer_attribute
        if kind == kinds.CU_MEMORYTYPE_HOST:
            return int(host)
        if kind != kinds.CU_MEMORYTYPE_UNIFIED:
            return None
        code, memory_type = self._driver.cuPointerGetAttribute(attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, int(unified))
        is_device = not int(code) and memory_type == kinds.CU_MEMORYTYPE_DEVICE  # CUDA does not know pageable memory.
        return None if is_device else int(unified)

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
        self._staged = 0

    @override
    def problem(self) -> str | None:
        """After an illegal address, say, every call returns the same error; a new process is the only way on."""
        try:
            with self._errors("has failed"):
                self.activate()
                self._check(self._driver.cuMemGetInfo())
        except BackendError as error:
            return str(error)
        return None

    @override
    def close(self) -> None:
        """Whatever uses this device must have been closed before. Raises BackendError, with all that can be freed."""
        with self._errors("does not close"), ExitStack() as closing:
            closing.callback(self._stream.close)
            for event in [*(event.event for event in self._events), *([self._done] if self._done else [])]:
                closing.callback(event.close)
            closing.callback(self._free)

    def _free(self) -> None:
        self.activate()
        while self._memory:
            self._driver.cuMemFree(self._memory.pop())  # Behind what is queued, which may use pinned memory too.
        self._events.clear()
        self._pinned.clear()
        self._staging = self._done = None

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
    """An event of the driver, as ``CudaDevice.event`` creates it."""

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
