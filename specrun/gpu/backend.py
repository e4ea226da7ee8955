"""Backends on a GPU: one protocol, and a module for each runtime."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from specrun.devices import Device, DeviceArray
from specrun.devices.cuda import CudaDevice
from specrun.devices.driver import compute_capability, why_no_gpu
from specrun.engine_dir.config import BackendName, EngineConfig
from specrun.engine_dir.contract import INPUT_IDS, LOGITS_INDICES, WRITE_INDICES
from specrun.gpu.states import DeviceStates
from specrun.kv_cache.rows import RecurrentCache
from specrun.optional_packages import import_package


class Feed(NamedTuple):
    """A forward pass's inputs in device memory: [B, S], [B], [B, K]."""

    input_ids: DeviceArray
    write_indices: DeviceArray
    logits_indices: DeviceArray

    def by_name(self) -> dict[str, DeviceArray]:
        """The inputs under the contract's names."""
        return dict(zip((INPUT_IDS, WRITE_INDICES, LOGITS_INDICES), self, strict=True))


class DeviceCache(RecurrentCache, Protocol):
    """The rows of a model's cache in device memory, and a pool of blocks."""

    states: DeviceStates | None
    """States of recurrent layers; None for models without them."""

    def allocate_pool(self, blocks: int) -> None:
        """Allocate a pool of ``blocks`` blocks. Raises RuntimeError the second time."""

    def part(self, first: int, rows: int) -> list[DeviceArray]:
        """Views of rows ``first .. first + rows`` [rows, heads, length, head_dim], one for each cache tensor."""


class DeviceBackend(Protocol):
    """An opened engine with inputs and outputs in device memory. Queues its work on its device's stream."""

    config: EngineConfig
    device: Device
    """Device that holds inputs and logits."""

    cache: DeviceCache
    """Cache of the engine; set by ``allocate_cache``."""

    devices: Sequence[Device]
    """``device``, and the devices of further ranks."""

    @property
    def capturable(self) -> bool:
        """Whether a CUDA graph may contain the passes that were queued with ``fixed``."""

    @property
    def workspace_bytes(self) -> int:
        """Bytes of memory that the engine takes beside weights and cache; 0 if unknown."""

    def allocate_cache(self) -> None:
        """Allocate the cache for the largest batch and the longest text, without a prefix cache."""

    def enqueue(self, feed: Feed, logits: DeviceArray, first: int, fixed: bool) -> None:
        """Queue one forward pass as the graph contract says: ``feed`` -> logits [B, K, V].

        The pass works on rows ``first .. first + B`` of the cache. It writes states of recurrent layers beside those of
        the rows. fixed: rounds repeat calls of this shape, so the engine may prepare for it.
        """

    def save_kernels(self) -> None:
        """Store the kernels that were compiled for this GPU for later runs, as ``close`` does."""

    def close(self) -> None:
        """Free the engine."""


def bound_tensors(cache: DeviceCache, cache_owner: DeviceBackend | None, first: int, rows: int) -> list[DeviceArray]:
    """Rows ``first .. first + rows`` of all tensors of a cache, and of the one that the cache owner shares."""
    shared = cache_owner.cache.part(first, rows)[-1:] if cache_owner else []
    return [*cache.part(first, rows), *shared]


def why_no_gpu_backend(name: BackendName) -> str | None:
    """Why engines of backend ``name`` cannot run on a GPU here, or None when they can."""
    if reason := why_no_gpu():
        return reason
    try:
        module = import_package(name)
    except Exception as error:  # A broken installation may raise anything.
        return f"{name} does not load: {' '.join(str(error).split())}"
    if name == "onnxruntime" and "CUDAExecutionProvider" not in module.get_available_providers():
        return "this onnxruntime has no CUDA; pip install onnxruntime-gpu in its place"
    return None


def open_device_backend(
    directory: Path, config: EngineConfig, devices: Sequence[CudaDevice], cache_owner: DeviceBackend | None = None
) -> DeviceBackend:
    """Load an engine onto a GPU, or one of several ranks onto as many GPUs.

    cache_owner: for a head, its target on the same GPU. Raises EngineDirError, and BackendError when its runtime is not
    installed.
    """
    device = devices[0]
    if config.backend.name == "onnxruntime":
        from specrun.gpu.ort import OrtDeviceBackend

        return OrtDeviceBackend(directory, config, device, cache_owner)
    if config.backend.name == "cuda":
        from specrun.gpu.decoder.backend import CudaBackend

        return CudaBackend.open(directory, config, device, cache_owner)
    if config.build_config.tp_size > 1:
        from specrun.gpu.trt_ranks import TrtRanks

        return TrtRanks(directory, config, devices, [compute_capability(device.number) for device in devices])
    from specrun.gpu.trt import TrtBackend

    return TrtBackend(directory, config, device, compute_capability(device.number), cache_owner)
