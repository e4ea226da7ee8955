"""Backends: what runs an engine's graph. One protocol, one module for each runtime."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, get_args

import numpy as np
import numpy.typing as npt

from specrun.engine_dir.config import BackendName, EngineConfig
from specrun.kv_cache.host import HostKVCache

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

    cache: HostKVCache
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
