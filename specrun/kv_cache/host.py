"""The key-value cache of one model in host memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from specrun.engine_dir import CacheTensor
from specrun.kv_cache import BLOCK

Cache = npt.NDArray[np.float32]


class HostKVCache:
    """Rows [rows, heads, length, head_dim] of every cache tensor, and its pool [blocks, heads, BLOCK, head_dim]."""

    def __init__(self, shapes: Sequence[CacheTensor], blocks: int) -> None:
        self.blocks = blocks
        self.rows = 0
        self.length = 0
        self._shapes = shapes
        # Where the numbers of one position end, tensor by tensor.
        self._ends = np.cumsum([shape.heads * shape.head_dim for shape in shapes])
        self._memory = np.empty(0, np.float32)
        self._tensors = self._divide(0, 0)
        # Block after block, so that blocks which were never kept cost no memory.
        pool = np.split(np.empty((blocks, BLOCK * self._ends[-1]), np.float32), BLOCK * self._ends[:-1], axis=1)
        self._pool = [
            part.reshape(blocks, shape.heads, BLOCK, shape.head_dim) for part, shape in zip(pool, shapes, strict=True)
        ]

    def resize(self, rows: int, length: int, used: int) -> None:
        """Have ``rows`` rows of ``length`` positions, keeping what the first ``used`` rows hold; at least as many then.

        Memory is slow when it is written for the first time, so what there is serves again.
        """
        if used and (rows < self.rows or length < self.length):
            raise ValueError(f"{self.rows} rows of {self.length} positions must not shrink while {used} are used")
        old, kept, size = self._tensors, self.length, rows * length * self._ends[-1]
        if size > self._memory.size:
            self._memory = np.zeros(size, np.float32)  # What is not written costs nothing.
        self._tensors = self._divide(rows, length)
        self.rows, self.length = rows, length
        # From the last: none is moved over one that has still to be moved.
        for tensor, before in zip(self._tensors[::-1], old[::-1], strict=True) if used else ():
            tensor[:used, :, :kept] = before[:used].copy()
            tensor[:used, :, kept:] = 0

    @property
    def nbytes(self) -> int:
        """Memory for rows, used or not."""
        return self._memory.nbytes

    def release(self) -> None:
        """Give the memory back: of all rows, and of the pool."""
        self.blocks = self.rows = self.length = 0
        self._memory = np.empty(0, np.float32)
        self._tensors, self._pool = [], []

    def part(self, first: int, rows: int) -> list[Cache]:
        """The tensors of rows ``first .. first + rows``, in the memory of the whole."""
        return [tensor[first : first + rows] for tensor in self._tensors]

    def clear(self, row: int) -> None:
        """See ``KVCache``."""
        for tensor in self._tensors:
            tensor[row] = 0

    def swap(self, one: int, other: int, held: tuple[int, int]) -> None:
        """See ``KVCache``."""
        ours, theirs = held
        for tensor in self._tensors:
            kept = tensor[one, :, :ours].copy()
            tensor[one, :, :theirs] = tensor[other, :, :theirs]
            tensor[other, :, :ours] = kept

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
        """A view [count, heads, BLOCK, head_dim] of a row's positions."""
        _, heads, _, width = tensor.shape
        positions = tensor[row, :, start : start + count * BLOCK]
        # Splitting an axis of a view needs no copy.
        view: Cache = positions.reshape(heads, count, BLOCK, width).transpose(1, 0, 2, 3)
        return view

    def _divide(self, rows: int, length: int) -> list[Cache]:
        """The tensors [rows, heads, length, head_dim], one behind the other in the memory."""
        ends = rows * length * self._ends
        parts = np.split(self._memory[: ends[-1]], ends[:-1])
        return [
            part.reshape(rows, shape.heads, length, shape.head_dim)
            for part, shape in zip(parts, self._shapes, strict=True)
        ]
