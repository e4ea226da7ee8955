"""A Markov head: what a draft token adds to the logits of the next one (DSpark, DeepSeek's DeepSpec).

The graph of such a head gives the logits of a block's places, none of which has seen the tokens of the others. The bias
W2 W1[token before] makes them logits of a token behind a token, so drafts are drawn one after the other. It is of low
rank, and no part of the graph: a table look-up and a product of a vector with a matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specrun.engine_dir.config import GraphInfo
from specrun.engine_dir.contract import MARKOV_FILES
from specrun.errors import EngineDirError
from specrun.sampling.sampler import Floats


@dataclass(frozen=True)
class Markov:
    """The two matrices of a Markov head."""

    w1: npt.NDArray[np.float32]
    """[V, rank]"""
    w2: npt.NDArray[np.float32]
    """[rank, logits]"""

    @classmethod
    def open(cls, directory: Path, graph: GraphInfo) -> Markov | None:
        """The matrices of an engine, mapped from its files; None where it has none. Raises EngineDirError."""
        if graph.markov_rank is None:
            return None
        vocab, rank = graph.vocab_size - graph.has_confidence, graph.markov_rank
        shapes = ((vocab, rank), (rank, graph.vocab_size))
        return cls(*(_read(directory / name, shape) for name, shape in zip(MARKOV_FILES, shapes, strict=True)))

    def applied(self, logits: Floats, before: int) -> Floats:
        """The logits of the token that follows the token ``before``."""
        biased: Floats = logits + self.w1[before] @ self.w2
        return biased


def _read(path: Path, shape: tuple[int, int]) -> npt.NDArray[np.float32]:
    try:
        matrix: Any = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise EngineDirError(f"{path}: not readable ({error}); build the engine again") from error
    if matrix.shape != shape or matrix.dtype != np.float32:
        raise EngineDirError(
            f"{path}: {matrix.dtype} {list(matrix.shape)}, config.json says float32 {list(shape)}; build the engine "
            "again"
        )
    return np.asarray(matrix)
