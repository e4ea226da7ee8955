"""The key-value cache of one model in host memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from specrun.engine_dir import CacheTensor
from specrun.kv_cache import BLOCK

Cache = npt.NDArray[np.float32]


class HostKVCache:
    """Rows [rows, heads, length, width] of every cache tensor, and a pool [blocks, heads, BLOCK, width] beside it."""

    def __init__(self, shapes: Sequence[CacheTensor], blocks: int) -> None:
        self.blocks = blocks
        self.rows = 0
        self.length = 0
        self._shapes = shapes
        self._tensors = [self._make(shape, 0, 0) for shape in shapes]
        # Memory that was never written costs nothing.
        self._pool = [np.empty((blocks, shape.heads, BLOCK, shape.width), np.float32) for shape in shapes]

    def resize(self, rows: int, length: int, used: int) -> None:
        """Have ``rows`` rows of ``length`` positions, keeping what the first ``used`` rows hold."""
        old, kept = self._tensors, min(length, self.length)
        self._tensors = [self._make(shape, rows, length) for shape in self._shapes]
        for tensor, before in zip(self._tensors, old, strict=True):
            tensor[:used, :, :kept] = before[:used, :, :kept]
        self.rows, self.length = rows, length

    def part(self, first: int, rows: int) -> list[Cache]:
        """The tensors of rows ``first .. first + rows``, in the memory of the whole."""
        return [tensor[first : first + rows] for tensor in self._tensors]

    def clear(self, row: int) -> None:
        """See ``KVCache``."""
        for tensor in self._tensors:
            tensor[row] = 0

    def move(self, source: int, to: int) -> None:
        """See ``KVCache``."""
        for tensor in self._tensors:
            tensor[to] = tensor[source]

    def save(self, row: int, start: int, blocks: Sequence[int]) -> None:
        """See ``KVCache``."""
        for tensor, pool in zip(self._tensors, self._pool, strict=True):
            pool[blocks] = self._blocks(tensor, row, start, len(blocks))

    def load(self, row: int, start: int, blocks: Sequence[int]) -> None:
        """See ``KVCache``."""
        for tensor, pool in zip(self._tensors, self._pool, strict=True):
            self._blocks(tensor, row, start, len(blocks))[...] = pool[blocks]

    @staticmethod
    def _blocks(tensor: Cache, row: int, start: int, count: int) -> Cache:
        """A view [count, heads, BLOCK, width] of a row's positions."""
        _, heads, _, width = tensor.shape
        positions = tensor[row, :, start : start + count * BLOCK]
        # Splitting an axis of a view needs no copy.
        view: Cache = positions.reshape(heads, count, BLOCK, width).transpose(1, 0, 2, 3)
        return view

    @staticmethod
    def _make(shape: CacheTensor, rows: int, length: int) -> Cache:
        return np.zeros((rows, shape.heads, length, shape.width), np.float32)
