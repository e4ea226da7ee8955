"""Backends: what runs an engine's graph. One protocol, one module for each runtime."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, get_args

import numpy as np
import numpy.typing as npt

from specrun.devices import Device, DeviceArray
from specrun.devices.driver import compute_capability, why_no_gpu
from specrun.engine_dir.config import BackendName, EngineConfig
from specrun.engine_dir.contract import INPUT_IDS, LOGITS_INDICES, WRITE_INDICES
from specrun.kv_cache.device_states import DeviceStates
from specrun.kv_cache.host import HostKVCache
from specrun.kv_cache.rows import RecurrentCache
from specrun.optional_packages import import_package

BACKEND_NAMES: tuple[BackendName, ...] = get_args(BackendName)


class Pass(Protocol):
    """A forward pass of one shape: arrays that the engine reads and writes in place, as the graph contract says."""

    input_ids: npt.NDArray[np.int64]
    """[B, S]"""
    write_indices: npt.NDArray[np.int64]
    """[B]"""
    logits_indices: npt.NDArray[np.int64]
    """[B, K]"""
    state_indices: npt.NDArray[np.int64]
    """[B]; read by models with recurrent layers only, as the next one is"""
    keep_indices: npt.NDArray[np.int64]
    """[B]"""
    logits: npt.NDArray[np.float32]
    """[B, K, V], valid until the engine's next pass."""

    def run(self) -> None:
        """Read the inputs, write the logits."""


class Backend(Protocol):
    """An opened engine with one key-value cache. Owns device memory; knows nothing of tokens' meaning."""

    config: EngineConfig
    cache_owner: Backend | None
    """The target of a head: it shares the target's features, and its cache has the target's rows and positions."""

    @property
    def cache(self) -> HostKVCache:
        """Its rows."""

    def resize(self, rows: int, length: int, used: int) -> None:
        """Have a cache of ``rows`` rows of ``length`` positions, keeping what the first ``used`` rows hold."""

    def bind(self, first: int, num_rows: int, query_len: int, num_logits: int) -> Pass:
        """A pass of ``query_len`` tokens for rows ``first .. first + num_rows``, with ``num_logits`` logits of each.

        Inputs hold what they held when the shape was bound last; zeros the first time. Valid until ``resize``.
        """

    def problem(self) -> str | None:
        """Why the engine cannot go on, as far as is known; None: it can. Any thread may ask."""

    def close(self) -> None:
        """Let go of the engine and its cache."""


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

    @property
    def states(self) -> DeviceStates | None:
        """What recurrent layers keep; None: there are none."""

    def allocate_pool(self, blocks: int) -> None:
        """Allocate a pool of ``blocks`` blocks. Raises RuntimeError the second time."""

    def part(self, first: int, rows: int) -> list[DeviceArray]:
        """Views of rows ``first .. first + rows`` [rows, heads, length, head_dim], one for each cache tensor."""


class DeviceBackend(Protocol):
    """An opened engine whose inputs and outputs are device memory. Queues its work on its device's stream."""

    config: EngineConfig
    device: Device
    """Where inputs and logits are."""

    @property
    def cache(self) -> DeviceCache:
        """There from ``allocate_cache`` on."""

    @property
    def devices(self) -> Sequence[Device]:
        """``device``, and those of further ranks."""

    @property
    def capturable(self) -> bool:
        """Whether a recording of the stream may contain what has been queued with ``fixed``."""

    @property
    def workspace_bytes(self) -> int:
        """Memory that the engine will take beside weights and cache; 0 where it cannot tell."""

    def allocate_cache(self) -> None:
        """Make the cache, for the largest batch and the longest text, without a prefix cache."""

    def enqueue(self, feed: Feed, logits: DeviceArray, first: int, fixed: bool) -> None:
        """Queue one forward pass as the graph contract says: ``feed`` -> logits [B, K, V].

        On rows ``first .. first + B`` of the cache. States of recurrent layers are left beside those of the rows.
        fixed: calls of this shape come again in every round, so it is worth preparing for.
        """

    def save_kernels(self) -> None:
        """Keep what was compiled for this GPU for later runs, as ``close`` does."""

    def close(self) -> None:
        """Let go of the engine."""


def bound_tensors(cache: DeviceCache, cache_owner: DeviceBackend | None, first: int, rows: int) -> list[DeviceArray]:
    """Rows ``first .. first + rows`` of all tensors of a cache, those that a target lends included."""
    shared = cache_owner.cache.part(first, rows)[-1:] if cache_owner else []
    return [*cache.part(first, rows), *shared]


def why_no_gpu_backend(name: BackendName) -> str | None:
    """Why engines of backend ``name`` cannot run on a GPU here, or None when they can."""
    if reason := why_no_gpu():
        return reason
    try:
        module = import_package(name)
    except Exception as error:  # Broken installations raise what they like.
        return f"{name} does not load: {' '.join(str(error).split())}"
    if name == "onnxruntime" and "CUDAExecutionProvider" not in module.get_available_providers():
        return "this onnxruntime has no CUDA; pip install onnxruntime-gpu in its place"
    return None


def open_host_backend(
    directory: Path,
    config: EngineConfig,
    blocks: int,
    shared_pool: bool = False,
    cache_owner: Backend | None = None,
    hosts: Sequence[str] = (),
) -> Backend:
    """Load an engine for the CPU, with ``blocks`` prefix cache blocks; shared_pool: of threads.

    cache_owner: of a head, its target. hosts: the machines of several ranks. Raises EngineDirError, and BackendError
    when its runtime is not installed.
    """
    if config.build_config.tp_size > 1:
        from specrun.backends.cpu_ranks.backend import RanksBackend

        return RanksBackend(directory, config, blocks, hosts)
    from specrun.backends.ort import OrtBackend

    return OrtBackend(directory, config, blocks, shared_pool, cache_owner)


def open_device_backend(
    directory: Path, config: EngineConfig, devices: Sequence[Device], cache_owner: DeviceBackend | None = None
) -> DeviceBackend:
    """Load an engine onto a GPU, or one of several ranks onto as many. cache_owner: of a head, its target on its GPU.

    Raises EngineDirError, and BackendError when its runtime is not installed.
    """
    device = devices[0]
    if config.backend.name == "onnxruntime":
        from specrun.backends.ort import OrtDeviceBackend

        return OrtDeviceBackend(directory, config, device, cache_owner)
    if config.build_config.tp_size > 1:
        from specrun.backends.trt_ranks import TrtRanks

        return TrtRanks(directory, config, devices, [compute_capability(device.number) for device in devices])
    from specrun.backends.trt import TrtBackend

    return TrtBackend(directory, config, device, compute_capability(device.number), cache_owner)
