"""The KV cache of one model in host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from specrun.engine_dir.cache_tensors import CacheTensor
from specrun.kv_cache import BLOCK
from specrun.kv_cache.kept_states import TOKENS_OF_STATE
from specrun.kv_cache.rows import RecurrentCache

Cache = npt.NDArray[Any]


class HostKVCache(RecurrentCache):
    """Cache in host memory: for every tensor, rows [rows, heads, length, head_dim] and a pool of prefix cache blocks.

    There are no rows before ``resize``. The pool is [blocks, heads, BLOCK, head_dim]. States of recurrent layers are
    here too (``StateTensor``).
    """

    def __init__(
        self,
        shapes: Sequence[CacheTensor],
        storage: npt.DTypeLike,
        blocks: int,
        states: Sequence[tuple[int, ...]] = (),
        allocate: Callable[[tuple[int, ...], npt.DTypeLike], Cache] = np.zeros,
        reads_hidden: bool = True,
    ) -> None:
        """storage: the dtype of the elements. states: the shapes of a row's. allocate: makes zeros for rows.

        reads_hidden: whether the engine reads what its mask hides. Where it does not, nothing is zeroed but states.
        """
        self.blocks = blocks
        self.rows = 0
        self.length = 0
        self._shapes = shapes
        self._allocate = allocate
        self._reads_hidden = reads_hidden
        # The elements of one position lie tensor by tensor; these are where the tensors begin, and where the last ends.
        self._memory = np.empty(0, storage)
        self._bounds = [0, *accumulate(shape.elements(self._memory.itemsize) for shape in shapes)]
        self.address = 0
        """The address of the rows' memory, kept because asking numpy takes microseconds."""
        self._tensors = self._divide(0, 0)
        self._states: list[Cache] = [np.zeros((0, *shape), np.float32) for shape in states]
        self._next, self._next_states = self._memory, self._states
        """Memory that was allocated for a larger size; empty where there is none."""
        self.kept_states = blocks * BLOCK // TOKENS_OF_STATE if states else 0
        """Number of states that the pool has room for."""
        self._state_pool: list[Cache] = [np.empty((self.kept_states, *shape), np.float32) for shape in states]
        # Block after block: the operating system provides no memory for blocks that were never written.
        pool = np.empty((blocks, BLOCK * self._bounds[-1]), storage)
        self._pool = [
            _elements(pool[:, BLOCK * begin : BLOCK * end], shape).reshape(blocks, shape.heads, BLOCK, shape.head_dim)
            for (begin, end), shape in zip(pairwise(self._bounds), shapes, strict=True)
        ]

    def allocate(self, rows: int, length: int) -> None:
        """Have the memory at hand that ``resize`` to this size needs. Raises MemoryError; nothing has changed then."""
        if (size := rows * length * self._bounds[-1]) > max(self._memory.size, self._next.size):
            self._next = self._allocate((size,), self._memory.dtype)  # Pages that are never written take no memory.
        for held, following in zip(self._states, self._next_states, strict=True):
            if rows > max(len(held), len(following)):
                shapes = [(rows, *state.shape[1:]) for state in self._states]
                self._next_states = [self._allocate(shape, np.float32) for shape in shapes]
                break

    def resize(self, rows: int, length: int, used: int) -> None:
        """Change to ``rows`` rows of ``length`` positions. The first ``used`` rows keep their contents.

        Raises ValueError where rows are in use and the size shrinks, and MemoryError; nothing has changed then. Memory
        that is large enough is used again, because memory is slow when it is first written.
        """
        if used and (rows < self.rows or length < self.length):
            raise ValueError(f"{self.rows} rows of {self.length} positions must not shrink while {used} are used")
        self.allocate(rows, length)
        old, old_length, size = self._tensors, self.length, rows * length * self._bounds[-1]
        if size > self._memory.size:
            self._memory, self._next = self._next, np.empty(0, self._memory.dtype)
            self.address = self._memory.ctypes.data
        self._tensors = self._divide(rows, length)
        self.rows, self.length = rows, length
        # From the last tensor to the first, so that none overwrites one that is still to be moved.
        for tensor, before in zip(self._tensors[::-1], old[::-1], strict=True) if used else ():
            tensor[:used, :, :old_length] = before[:used]
            if self._reads_hidden:
                tensor[:used, :, old_length:] = 0
        if self._states and len(self._states[0]) < rows:
            smaller, self._states = self._states, self._next_states
            self._next_states = [np.empty((0, *state.shape[1:]), np.float32) for state in smaller]
            for state, old_state in zip(self._states, smaller, strict=True):
                state[:used] = old_state[:used]

    @property
    def nbytes(self) -> int:
        """Bytes of memory for rows, in use or not."""
        return self._memory.nbytes + sum(state.nbytes for state in self._states)

    def release(self) -> None:
        """Free the memory of all rows and of the pool."""
        self.blocks = self.rows = self.length = self.address = 0
        self._memory = np.empty(0, self._memory.dtype)
        self._next = self._memory
        self._tensors, self._pool, self._states, self._state_pool, self._next_states = [], [], [], [], []

    def part(self, first: int, rows: int) -> list[Cache]:
        """Views [rows, heads, length, head_dim] of rows ``first .. first + rows``, one for each cache tensor."""
        return [tensor[first : first + rows] for tensor in self._tensors]

    def states(self, first: int, rows: int) -> list[Cache]:
        """Views of what recurrent layers keep of rows ``first .. first + rows``."""
        return [state[first : first + rows] for state in self._states]

    @override
    def clear(self, row: int) -> None:
        for tensor in self._tensors if self._reads_hidden else ():
            tensor[row] = 0
        self.clear_states(row)

    @override
    def clear_states(self, row: int) -> None:
        for state in self._states:
            state[row] = 0

    @override
    def swap(self, row: int, other: int, lengths: tuple[int, int]) -> None:
        first, second = lengths
        for tensor in self._tensors:
            saved = tensor[row, :, :first].copy()
            tensor[row, :, :second] = tensor[other, :, :second]
            tensor[other, :, :first] = saved
        for state in self._states:
            state[[row, other]] = state[[other, row]]

    @override
    def save(self, row: int, start: int, blocks: Sequence[int]) -> None:
        for tensor, pool in zip(self._tensors, self._pool, strict=True):
            pool[blocks] = self._blocks(tensor, row, start, len(blocks))

    @override
    def load(self, row: int, start: int, blocks: Sequence[int]) -> None:
        for tensor, pool in zip(self._tensors, self._pool, strict=True):
            self._blocks(tensor, row, start, len(blocks))[...] = pool[blocks]

    @override
    def save_state(self, row: int, slot: int) -> None:
        for state, pool in zip(self._states, self._state_pool, strict=True):
            pool[slot] = state[row]

    @override
    def load_state(self, row: int, slot: int) -> None:
        for state, pool in zip(self._states, self._state_pool, strict=True):
            state[row] = pool[slot]

    @staticmethod
    def _blocks(tensor: Cache, row: int, start: int, count: int) -> Cache:
        """A view [count, heads, BLOCK, head_dim] of a row's positions from ``start`` on."""
        _, heads, _, head_dim = tensor.shape
        positions = tensor[row, :, start : start + count * BLOCK]
        # Splitting an axis of a view needs no copy.
        view: Cache = positions.reshape(heads, count, BLOCK, head_dim).transpose(1, 0, 2, 3)
        return view

    def _divide(self, rows: int, length: int) -> list[Cache]:
        """The tensors [rows, heads, length, head_dim], which lie in the memory one after the other."""
        positions, bounds = rows * length, pairwise(self._bounds)
        parts = [self._memory[positions * begin : positions * end] for begin, end in bounds]
        return [
            _elements(part, shape).reshape(rows, shape.heads, length, shape.head_dim)
            for part, shape in zip(parts, self._shapes, strict=True)
        ]


def _elements(memory: Cache, shape: CacheTensor) -> Cache:
    """A view of a tensor's memory as its elements."""
    return memory.view(np.float32) if shape.in_float32 else memory
