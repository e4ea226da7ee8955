"""The KV cache of one model in device memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from specrun.devices import Device, DeviceArray
from specrun.engine_dir.cache_tensors import CacheTensor
from specrun.gpu.backend import DeviceCache
from specrun.gpu.kernels import calls
from specrun.gpu.kernels.layout import CACHE_TENSOR
from specrun.gpu.states import DeviceStates
from specrun.kv_cache import BLOCK
from specrun.kv_cache.kept_states import TOKENS_OF_STATE


class DeviceKVCache(DeviceCache):
    """The cache of one GPU: for every cache tensor, rows [rows, heads, length, head_dim] and a pool of blocks.

    Rows are allocated at once. The pool [blocks, heads, BLOCK, head_dim] is allocated later, when it is known how much
    memory is free. Raises BackendError where memory is short.
    """

    def __init__(
        self,
        device: Device,
        shapes: Sequence[CacheTensor],
        storage: npt.DTypeLike,
        rows: int,
        length: int,
        new_positions: int = 0,
        states: DeviceStates | None = None,
    ) -> None:
        """storage: the dtype of the elements. length: positions of a row. states: those of the same rows.

        new_positions: number of positions that ``new`` has memory for; 0 for engines that update the cache in place.
        """
        self.rows = rows
        self.length = length
        self.blocks = 0
        self.states = states
        self.kept_states = 0
        """Number of states that the pool has room for."""
        self._device = device
        self._shapes = shapes
        self._storage = np.dtype(storage)
        self._tensors = [device.zeros((rows * shape.heads * length * shape.head_dim,), storage) for shape in shapes]
        self._pool: list[DeviceArray] = []
        self._block_numbers = device.zeros((length // BLOCK,), np.int32)
        self._tensor_table = device.zeros((len(shapes),), CACHE_TENSOR)
        self._write_table(self._tensor_table, [0] * len(shapes))
        self._new: list[DeviceArray] = []
        if new_positions:
            sizes = [(new_positions, shape.heads, shape.head_dim) for shape in shapes]
            self._new = [device.zeros(size, storage) for size in sizes]
            self._new_table = device.zeros((len(shapes),), CACHE_TENSOR)
            self._write_table(self._new_table, [new.address for new in self._new])
        self._max_heads = max((shape.heads for shape in shapes), default=0)
        self._max_position_bytes = max((shape.head_dim for shape in shapes), default=0) * self._storage.itemsize

    @override
    def allocate_pool(self, blocks: int) -> None:
        if self._pool:
            raise RuntimeError("the pool is allocated already")
        if blocks:
            zeros, sizes = self._device.zeros, [(blocks, shape.heads, BLOCK, shape.head_dim) for shape in self._shapes]
            self._pool = [zeros(size, self._storage) for size in sizes]
            self._write_table(self._tensor_table, [pool.address for pool in self._pool])
        self.blocks = blocks
        if self.states:
            self.kept_states = blocks * BLOCK // TOKENS_OF_STATE
            self.states.allocate_pool(self.kept_states)

    @override
    def part(self, first: int, rows: int) -> list[DeviceArray]:
        parts = []
        for shape, tensor in zip(self._shapes, self._tensors, strict=True):
            row = (shape.heads, self.length, shape.head_dim)
            parts.append(tensor.part(first * math.prod(row), (rows, *row)))
        return parts

    @override
    def clear(self, row: int) -> None:
        for tensor in self.part(row, 1):
            self._device.clear(tensor)
        self.clear_states(row)

    @override
    def clear_states(self, row: int) -> None:
        if self.states:
            self.states.clear(row)

    @override
    def swap(self, row: int, other: int, lengths: tuple[int, int]) -> None:
        if positions := max(lengths):
            calls.swap_rows(
                self._device,
                tensors=self._tensor_table,
                length=self.length,
                row=row,
                other=other,
                positions=positions,
                heads=self._max_heads,
                size=self._max_position_bytes,
            )
        if self.states:
            self.states.swap(row, other)

    @override
    def save(self, row: int, start: int, blocks: Sequence[int]) -> None:
        self._copy(row, start, blocks, saving=True)

    @override
    def load(self, row: int, start: int, blocks: Sequence[int]) -> None:
        self._copy(row, start, blocks, saving=False)

    @override
    def save_state(self, row: int, slot: int) -> None:
        if self.states:
            self.states.save(row, slot)

    @override
    def load_state(self, row: int, slot: int) -> None:
        if self.states:
            self.states.load(row, slot)

    def new(self) -> list[DeviceArray]:
        """Memory for an engine's new keys and values, if they are outputs: [B, heads, S, head_dim] of each tensor."""
        return self._new

    def write_new(self, first: int, write_indices: DeviceArray, query_len: int) -> None:
        """Queue a copy of ``new`` to the rows from ``first`` on, at ``write_indices`` [B] int64.

        Raises ValueError where ``new`` has no room for so many positions.
        """
        (batch,) = write_indices.shape
        if batch * query_len > self._new[0].shape[0]:
            raise ValueError(f"{batch} rows of {query_len} new positions: there is room for {self._new[0].shape[0]}")
        calls.write_positions(
            self._device,
            tensors=self._new_table,
            length=self.length,
            first=first,
            write_indices=write_indices,
            query_len=query_len,
            heads=self._max_heads,
            size=self._max_position_bytes,
        )

    def _write_table(self, table: DeviceArray, pools: Sequence[int]) -> None:
        """Write the CACHE_TENSORs that kernels read. pools: address of each tensor's pool or new positions."""
        content = [
            (rows.address, pool, shape.heads, shape.head_dim * self._storage.itemsize)
            for shape, rows, pool in zip(self._shapes, self._tensors, pools, strict=True)
        ]
        self._device.write(table, np.array(content, CACHE_TENSOR))

    def _copy(self, row: int, start: int, blocks: Sequence[int], saving: bool) -> None:
        if not blocks:
            return
        if start + len(blocks) * BLOCK > self.length:
            raise ValueError(f"{len(blocks)} blocks from position {start} do not fit into {self.length} positions")
        numbers = self._block_numbers.part(0, (len(blocks),))
        self._device.write(numbers, np.array(blocks, np.int32))
        calls.copy_blocks(
            self._device,
            tensors=self._tensor_table,
            length=self.length,
            row=row,
            start=start,
            blocks=numbers,
            saving=saving,
            heads=self._max_heads,
        )
