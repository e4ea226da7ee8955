"""Backends: what runs an engine's graph. One protocol, one module for each runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from specrun.engine_dir import EngineConfig
from specrun.errors import BackendError


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


def open_backend(directory: Path, config: EngineConfig) -> Backend:
    """Load the engine in ``directory``. Raises BackendError when its runtime is not usable here."""
    if config.backend.name == "onnxruntime":
        from specrun.backends.ort import OrtBackend

        return OrtBackend(directory, config)
    raise BackendError(
        f"{directory}: a {config.backend.name} engine; this release compiles such plans but runs onnxruntime engines "
        "only: build one with 'specbuild engine --backend onnxruntime'"
    )
