"""Backends: what runs an engine's graph. One protocol, one module for each runtime."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import NamedTuple, Protocol, get_args

import numpy as np
import numpy.typing as npt

from specrun.contract import INPUT_IDS, LOGITS_INDICES, WRITE_INDICES
from specrun.devices import Device, DeviceArray
from specrun.devices.driver import compute_capability, why_no_gpu
from specrun.engine_dir import BackendName, EngineConfig

BACKEND_NAMES: tuple[BackendName, ...] = get_args(BackendName)


class Backend(Protocol):
    """An opened engine with one key-value cache. Owns device memory; knows nothing of tokens' meaning."""

    config: EngineConfig

    def allocate_cache(self, rows: int, length: int) -> int:
        """Make room for ``rows`` rows of at least ``length`` positions, forgetting what was there.

        Returns the positions a row really has (S_max).
        """

    def run(
        self,
        input_ids: npt.NDArray[np.int64],
        write_indices: npt.NDArray[np.int64],
        logits_indices: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.float32]:
        """One forward pass as the graph contract says: [B, S], [B], [B, K] -> logits [B, K, V].

        The result is valid until the next call.
        """


class Feed(NamedTuple):
    """A forward pass's inputs in device memory: [B, S], [B], [B, K]."""

    input_ids: DeviceArray
    write_indices: DeviceArray
    logits_indices: DeviceArray

    def by_name(self) -> dict[str, DeviceArray]:
        """The inputs under the contract's names."""
        return dict(zip((INPUT_IDS, WRITE_INDICES, LOGITS_INDICES), self, strict=True))


class DeviceBackend(Protocol):
    """An opened engine whose inputs and outputs are device memory. Queues its work on its device's stream."""

    config: EngineConfig
    device: Device

    @property
    def recordable(self) -> bool:
        """Whether a recording of the stream may contain what has been queued with ``fixed``."""

    @property
    def workspace_bytes(self) -> int:
        """Memory that the engine will take beside weights and cache; 0 where it cannot tell."""

    def allocate_cache(self, rows: int, length: int) -> int:
        """See ``Backend.allocate_cache``. Addresses stay the same from call to call."""

    def enqueue(self, feed: Feed, logits: DeviceArray, fixed: bool) -> None:
        """Queue one forward pass as the graph contract says: ``feed`` -> logits [B, K, V].

        fixed: calls of this shape come again in every round, so it is worth preparing for.
        """

    def close(self) -> None:
        """Let go of the engine."""


def why_no_gpu_backend(name: BackendName) -> str | None:
    """Why engines of backend ``name`` cannot run on a GPU here, or None when they can."""
    if reason := why_no_gpu():
        return reason
    try:
        module = importlib.import_module(name)
    except Exception as error:  # Broken installations raise what they like.
        return f"{name} does not load: {' '.join(str(error).split())}"
    if name == "onnxruntime" and "CUDAExecutionProvider" not in module.get_available_providers():
        return "this onnxruntime has no CUDA; pip install onnxruntime-gpu in its place"
    return None


def open_host_backend(directory: Path, config: EngineConfig) -> Backend:
    """Load an engine for the CPU. Raises EngineDirError, and BackendError when its runtime is not installed."""
    from specrun.backends.ort import OrtBackend

    return OrtBackend(directory, config)


def open_device_backend(directory: Path, config: EngineConfig, device: Device) -> DeviceBackend:
    """Load an engine onto a GPU. Raises EngineDirError, and BackendError when its runtime is not installed."""
    if config.backend.name == "onnxruntime":
        from specrun.backends.ort import OrtDeviceBackend

        return OrtDeviceBackend(directory, config, device)
    from specrun.backends.trt import TrtBackend

    return TrtBackend(directory, config, device, compute_capability(device.number))
