"""The key-value cache of one model in device memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from specrun.devices import Device, DeviceArray
from specrun.engine_dir import CacheTensor
from specrun.kernels import calls
from specrun.kernels.layout import CACHE_TENSOR
from specrun.kv_cache import BLOCK


class DeviceKVCache:
    """Rows [rows, heads, length, head_dim] of every cache tensor, and its pool [blocks, heads, BLOCK, head_dim].

    ``rows`` rows of ``length`` positions are allocated at once, the pool when the room for it is known.
    """

    def __init__(
        self,
        device: Device,
        shapes: Sequence[CacheTensor],
        storage: npt.DTypeLike,
        rows: int,
        length: int,
    ) -> None:
        self.rows = rows
        self.length = length
        self.blocks = 0
        self._device = device
        self._shapes = shapes
        self._storage = np.dtype(storage)
        self._tensors = [device.zeros((rows * shape.heads * length * shape.head_dim,), storage) for shape in shapes]
        self._pool: list[DeviceArray] = []
        self._numbers = device.zeros((length // BLOCK,), np.int32)
        self._table = device.zeros((len(shapes),), CACHE_TENSOR)
        self._write_table([0] * len(shapes))
        self._most_heads = max(shape.heads for shape in shapes)
        self._most_bytes = max(shape.head_dim for shape in shapes) * self._storage.itemsize

    def allocate_pool(self, blocks: int) -> None:
        """Have a pool of ``blocks`` blocks; once."""
        if self._pool:
            raise RuntimeError("the pool is allocated already")
        if blocks:
            zeros, sizes = self._device.zeros, [(blocks, shape.heads, BLOCK, shape.head_dim) for shape in self._shapes]
            self._pool = [zeros(size, self._storage) for size in sizes]
            self._write_table([pool.address for pool in self._pool])
        self.blocks = blocks

    def part(self, first: int, rows: int) -> list[DeviceArray]:
        """The tensors of rows ``first .. first + rows``, in the memory of the whole."""
        parts = []
        for shape, tensor in zip(self._shapes, self._tensors, strict=True):
            row = (shape.heads, self.length, shape.head_dim)
            parts.append(tensor.part(first * math.prod(row), (rows, *row)))
        return parts

    def clear(self, row: int) -> None:
        """See ``KVCache``."""
        for tensor in self.part(row, 1):
            self._device.clear(tensor)

    def swap(self, one: int, other: int, held: tuple[int, int]) -> None:
        """See ``KVCache``."""
        positions = max(held)
        if positions:
            calls.swap_rows(
                self._device,
                tensors=self._table,
                length=self.length,
                one=one,
                other=other,
                positions=positions,
                heads=self._most_heads,
                size=self._most_bytes,
            )

    def save(self, row: int, start: int, blocks: Sequence[int]) -> None:
        """See ``KVCache``."""
        self._copy(row, start, blocks, saving=True)

    def load(self, row: int, start: int, blocks: Sequence[int]) -> None:
        """See ``KVCache``."""
        self._copy(row, start, blocks, saving=False)

    def _write_table(self, pools: Sequence[int]) -> None:
        """Tell kernels where the tensors are, and their parts of the pool."""
        table = [
            (rows.address, pool, shape.heads, shape.head_dim * self._storage.itemsize)
            for shape, rows, pool in zip(self._shapes, self._tensors, pools, strict=True)
        ]
        self._device.write(self._table, np.array(table, CACHE_TENSOR))

    def _copy(self, row: int, start: int, blocks: Sequence[int], saving: bool) -> None:
        if not blocks:
            return
        if start + len(blocks) * BLOCK > self.length:
            raise ValueError(f"{len(blocks)} blocks from position {start} of {self.length}")
        numbers = self._numbers.part(0, (len(blocks),))
        self._device.write(numbers, np.array(blocks, np.int32))
        calls.copy_blocks(
            self._device,
            tensors=self._table,
            length=self.length,
            row=row,
            start=start,
            blocks=numbers,
            saving=saving,
            heads=self._most_heads,
        )
