"""ONNX Runtime on CUDA, with the cache updated in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from typing_extensions import override

from specrun.backends.ort import open_session
from specrun.backends.ort_session import import_ort
from specrun.devices import Device, DeviceArray
from specrun.engine_dir.config import EngineConfig
from specrun.engine_dir.contract import LOGITS
from specrun.errors import BackendError
from specrun.gpu.backend import DeviceBackend, Feed, bound_tensors
from specrun.gpu.cache import DeviceKVCache


class OrtDeviceBackend(DeviceBackend):
    """Runs a graph on device memory: CUDA's, or the host's in tests."""

    def __init__(
        self, directory: Path, config: EngineConfig, device: Device, cache_owner: DeviceBackend | None = None
    ) -> None:
        self.config = config
        self.device, self.devices = device, [device]
        self._cache_owner = cache_owner
        provider, options = "CPUExecutionProvider", {}
        if device.kind == "cuda":
            _load_cuda_libraries()
            # On our own stream, kernels before and after need no synchronization.
            provider = "CUDAExecutionProvider"
            options = {
                "device_id": str(device.number),
                "user_compute_stream": str(device.stream),
                "use_tf32": "0",  # float32 means float32.
            }
        self._session = open_session(directory, config, provider, options)
        self._bindings: dict[tuple[int, int], Any] = {}
        self._options = import_ort().RunOptions()
        self._options.add_run_config_entry("disable_synchronize_execution_providers", "1")

    @property
    @override
    def capturable(self) -> bool:
        """ONNX Runtime reuses the memory of a shape's first call, so later calls allocate nothing.

        The device refuses to capture graphs that are partly computed on the host.
        """
        return self.device.kind == "cuda" and self.config.backend.capturable

    @property
    @override
    def workspace_bytes(self) -> int:
        """0: ONNX Runtime does not report what it allocates."""
        return 0

    @override
    def allocate_cache(self) -> None:
        graph, build = self.config.graph, self.config.build_config
        storage = graph.cache_element.storage
        size = (build.max_batch_size, build.cache_length)
        self.cache = DeviceKVCache(self.device, graph.own_tensors, storage, *size)

    @override
    def enqueue(self, feed: Feed, logits: DeviceArray, first: int, fixed: bool) -> None:
        self.device.activate()
        rows = (first, feed.input_ids.shape[0])
        binding = self._bindings.get(rows)
        if binding is None:
            binding = self._bindings[rows] = self._bind_cache(*rows)
        for name, array in feed.by_name().items():
            self._bind(binding.bind_input, name, array, array.dtype)
        self._bind(binding.bind_output, LOGITS, logits, logits.dtype)
        self._session.run_with_iobinding(binding, self._options)

    def _bind_cache(self, first: int, rows: int) -> Any:
        binding, graph = self._session.io_binding(), self.config.graph
        element = graph.cache_element.onnx
        cache = bound_tensors(self.cache, self._cache_owner, first, rows)
        for past, present, memory in zip(graph.past_names, graph.present_names, cache, strict=True):
            self._bind(binding.bind_input, past, memory, element)
            self._bind(binding.bind_output, present, memory, element)
        return binding

    @override
    def save_kernels(self) -> None:
        """Nothing: ONNX Runtime compiles none."""

    @override
    def close(self) -> None:
        self._bindings.clear()
        self._session = None

    def _bind(self, bind: Any, name: str, array: DeviceArray, element: Any) -> None:
        bind(name, self.device.kind, self.device.number, element, array.shape, array.address)


def _load_cuda_libraries() -> None:
    """Load the libraries of ONNX Runtime's CUDA provider, which does not find those that pip has installed."""
    from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

    for name in ("cudart", "cublasLt", "cublas", "curand"):
        try:
            load_nvidia_dynamic_lib(name)
        except DynamicLibNotFoundError as error:
            raise BackendError(
                f"onnxruntime's CUDA provider needs CUDA's library {name}, which is not here: pip install "
                "nvidia-cuda-runtime nvidia-cublas nvidia-curand"
            ) from error
