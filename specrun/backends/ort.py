"""ONNX Runtime on the CPU and on CUDA, with the cache updated in place."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from specrun.backends import Feed
from specrun.contract import INPUT_IDS, LOGITS, LOGITS_INDICES, WRITE_INDICES, past_names, present_names
from specrun.devices import Device, DeviceArray
from specrun.engine_dir import EngineConfig
from specrun.errors import BackendError, EngineDirError

_GRAPH = "model.onnx"
_pool_made = False


class CacheDtype(NamedTuple):
    """A cache's dtype: what numpy stores it as, what ``io_binding`` calls it (numpy or ONNX), ONNX Runtime's name."""

    storage: type[np.generic]
    element: Any
    name: str


CACHE_DTYPES = {
    "float32": CacheDtype(np.float32, np.float32, "float"),
    "float16": CacheDtype(np.float16, np.float16, "float16"),
    "bfloat16": CacheDtype(np.uint16, 16, "bfloat16"),  # TensorProto.BFLOAT16; numpy has none.
}


class OrtBackend:
    """See ``Backend``. Inputs, outputs and cache are bound by address, so nothing is copied."""

    def __init__(self, directory: Path, config: EngineConfig) -> None:
        self.config = config
        self._session = _open(directory, config, "CPUExecutionProvider", {})
        self._binding = self._session.io_binding()
        self._cache: list[npt.NDArray[np.float32]] = []
        self._logits = np.empty((0, 0, 0), np.float32)

    def allocate_cache(self, rows: int, length: int) -> int:
        """The graph's S_max is free here, so the cache is as long as the batch needs: attention costs less."""
        graph = self.config.graph
        self._binding = self._session.io_binding()
        self._cache = [np.zeros((rows, shape.heads, length, shape.width), np.float32) for shape in graph.caches]
        names = zip(past_names(graph.layers), present_names(graph.layers), self._cache, strict=True)
        for past, present, memory in names:
            self._bind(self._binding.bind_input, past, memory)
            self._bind(self._binding.bind_output, present, memory)
        self._logits = np.empty((0, 0, 0), np.float32)
        return length

    def run(
        self,
        input_ids: npt.NDArray[np.int64],
        write_indices: npt.NDArray[np.int64],
        logits_indices: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.float32]:
        """See ``Backend.run``."""
        shape = (*logits_indices.shape, self.config.graph.vocab_size)
        if self._logits.shape != shape:
            self._logits = np.empty(shape, np.float32)
            self._bind(self._binding.bind_output, LOGITS, self._logits)
        self._bind(self._binding.bind_input, INPUT_IDS, input_ids)
        self._bind(self._binding.bind_input, WRITE_INDICES, write_indices)
        self._bind(self._binding.bind_input, LOGITS_INDICES, logits_indices)
        self._session.run_with_iobinding(self._binding)
        return self._logits

    @staticmethod
    def _bind(bind: Any, name: str, array: npt.NDArray[Any]) -> None:
        bind(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)


class OrtDeviceBackend:
    """See ``DeviceBackend``. The same graph on device memory: CUDA's, or for tests the host's."""

    def __init__(self, directory: Path, config: EngineConfig, device: Device) -> None:
        self.config = config
        self.device = device
        provider, options = "CPUExecutionProvider", {}
        if device.kind == "cuda":
            _load_cuda_libraries()
            # On our own stream, kernels before and after need no synchronisation.
            provider = "CUDAExecutionProvider"
            options = {
                "device_id": str(device.number),
                "user_compute_stream": str(device.stream),
                "use_tf32": "0",  # float32 means float32.
            }
        self._session = _open(directory, config, provider, options)
        self._binding = self._session.io_binding()
        self._options = _ort().RunOptions()
        self._options.add_run_config_entry("disable_synchronize_execution_providers", "1")
        self._cache: list[DeviceArray] = []

    @property
    def recordable(self) -> bool:
        """ONNX Runtime allocates while it runs, which a recording does not allow."""
        return False

    @property
    def workspace_bytes(self) -> int:
        """ONNX Runtime allocates on its own and does not tell."""
        return 0

    def allocate_cache(self, rows: int, length: int) -> int:
        """Room for the largest batch is made once; a batch uses the part it needs."""
        graph, build = self.config.graph, self.config.build_config
        # CUDA's memory-efficient attention wants masks of such lengths.
        length = _round_up(min(length, build.cache_length), 8)
        kind = CACHE_DTYPES[graph.dtype]
        if not self._cache:
            size = build.max_batch_size * _round_up(build.cache_length, 8)
            self._cache = [self.device.zeros((size * c.heads * c.width,), kind.storage) for c in graph.caches]
        self._binding = self._session.io_binding()
        names = zip(past_names(graph.layers), present_names(graph.layers), graph.caches, self._cache, strict=True)
        for past, present, cache, memory in names:
            used = memory.part(0, (rows, cache.heads, length, cache.width))
            self.device.clear(used)
            self._bind(self._binding.bind_input, past, used, kind.element)
            self._bind(self._binding.bind_output, present, used, kind.element)
        return length

    def enqueue(self, feed: Feed, logits: DeviceArray, fixed: bool) -> None:
        """See ``DeviceBackend.enqueue``."""
        self.device.activate()
        for name, array in feed.by_name().items():
            self._bind(self._binding.bind_input, name, array, array.dtype)
        self._bind(self._binding.bind_output, LOGITS, logits, logits.dtype)
        self._session.run_with_iobinding(self._binding, self._options)

    def close(self) -> None:
        """See ``DeviceBackend.close``."""
        self._binding = self._session = None

    def _bind(self, bind: Any, name: str, array: DeviceArray, element: Any) -> None:
        bind(name, self.device.kind, self.device.number, element, array.shape, array.address)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _load_cuda_libraries() -> None:
    """Load what ONNX Runtime's CUDA provider links to: it looks on the system only, pip puts it elsewhere."""
    from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

    for name in ("cudart", "cublasLt", "cublas", "curand"):
        try:
            load_nvidia_dynamic_lib(name)
        except DynamicLibNotFoundError as error:
            raise BackendError(
                f"onnxruntime's CUDA provider needs CUDA's library {name}, which is not here: pip install "
                "nvidia-cuda-runtime nvidia-cublas nvidia-curand"
            ) from error


def _open(directory: Path, config: EngineConfig, provider: str, provider_options: dict[str, str]) -> Any:
    """A session on the engine's graph, checked against the contract. Raises EngineDirError and BackendError."""
    ort, options = session_options()
    if provider not in ort.get_available_providers():
        raise BackendError(
            f"onnxruntime {ort.__version__} has no {provider}; pip install onnxruntime-gpu in place of onnxruntime"
        )
    optimised = provider == "CPUExecutionProvider"  # When it was built, for this processor.
    level = ort.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_DISABLE_ALL if optimised else level.ORT_ENABLE_ALL
    try:
        session = ort.InferenceSession(directory / _GRAPH, options, providers=[(provider, provider_options)])
    except Exception as error:  # ONNX Runtime's exceptions share no base class.
        raise EngineDirError(f"{directory}: onnxruntime {ort.__version__} does not load it ({error})") from error
    if session.get_providers()[0] != provider:  # ONNX Runtime falls back to the CPU with no more than a warning.
        raise BackendError(f"{directory}: onnxruntime {ort.__version__} could not start {provider} on this machine")
    _check_contract(directory, config, session)
    return session


def _check_contract(directory: Path, config: EngineConfig, session: Any) -> None:
    """Raise EngineDirError unless the graph is what config.json says: memory is bound by these sizes."""
    layers = config.graph.layers
    caches = [[shape.heads, shape.width] for shape in config.graph.caches]
    tokens: tuple[str, list[int]] = ("tensor(int64)", [])
    expected = dict.fromkeys((INPUT_IDS, WRITE_INDICES, LOGITS_INDICES), tokens)
    kind = f"tensor({CACHE_DTYPES[config.graph.dtype].name})"
    for names in (past_names(layers), present_names(layers)):
        expected |= {name: (kind, sizes) for name, sizes in zip(names, caches, strict=True)}
    expected[LOGITS] = ("tensor(float)", [config.graph.vocab_size])
    found = {
        value.name: (value.type, [size for size in value.shape if isinstance(size, int)])
        for value in (*session.get_inputs(), *session.get_outputs())
    }
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise EngineDirError(
                f"{directory}: the graph's {name} is {found.get(name)}, config.json says {expected.get(name)}; "
                "build the engine again"
            )


def _ort() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise BackendError("onnxruntime is not installed: pip install onnxruntime") from error
    return onnxruntime


def session_options() -> tuple[Any, Any]:
    """The onnxruntime module, and options for a session on the thread pool that all sessions of the process share.

    Two sessions with pools of their own slow each other down: the idle one's threads spin on the busy one's cores.
    Once the shared pool exists, onnxruntime refuses sessions that want their own. Raises BackendError.
    """
    global _pool_made
    ort = _ort()
    if not _pool_made:
        ort.set_global_thread_pool_sizes(len(os.sched_getaffinity(0)), 1)
        _pool_made = True
    options = ort.SessionOptions()
    options.use_per_session_threads = False
    options.log_severity_level = 3
    return ort, options
