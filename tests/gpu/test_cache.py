"""A key-value cache in device memory (the host build's, or a GPU's; see ``kernel_device``) against numpy slices."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from specrun.engine_dir.cache_tensors import CacheTensor
from specrun.gpu.cache import DeviceKVCache
from specrun.kv_cache import BLOCK
from tests.helpers.host_device import kernel_device

SHAPES = [CacheTensor(heads=2, head_dim=8), CacheTensor(heads=3, head_dim=5)]
ROWS, BLOCKS = 3, 6


def read(cache: DeviceKVCache) -> list[npt.NDArray[Any]]:
    device, found = kernel_device(), []
    for array in cache.part(0, cache.rows):
        mirror = device.pinned_like(array)
        device.copy_to_host(array, mirror)
        device.wait()
        found.append(mirror.copy())
    return found


def fill(cache: DeviceKVCache, generator: np.random.Generator) -> list[npt.NDArray[Any]]:
    """Random contents, row by row."""
    for row in range(cache.rows):
        for array in cache.part(row, 1):
            kernel_device().write(array, generator.integers(0, 1 << 15, array.shape).astype(array.dtype))
    return read(cache)


@pytest.mark.parametrize("length", [75, 67])
@pytest.mark.parametrize("storage", [np.float32, np.float16, np.uint16])
def test_rows_and_blocks_are_numpys(storage: type[np.generic], length: int) -> None:
    """Elements of both sizes, widths and lengths of every alignment; what is not copied stays."""
    cache = DeviceKVCache(kernel_device(), SHAPES, storage, ROWS, length)
    cache.allocate_pool(BLOCKS)
    rows = fill(cache, np.random.default_rng(length))
    pool = [np.zeros((BLOCKS, shape.heads, BLOCK, shape.head_dim), storage) for shape in SHAPES]
    copies = [("save", 1, 0, [5, 0, 3]), ("save", 2, 3, [1]), ("load", 0, 19, [0, 1, 5]), ("load", 2, 0, [])]
    for what, row, start, numbers in copies:
        getattr(cache, what)(row, start, numbers)
        for tensor, blocks in zip(rows, pool, strict=True):
            for i, number in enumerate(numbers):
                positions = tensor[row, :, start + i * BLOCK : start + (i + 1) * BLOCK]
                to, source = (blocks[number], positions) if what == "save" else (positions, blocks[number])
                to[...] = source
    cache.swap(2, 1, (length, length))
    for tensor, found in zip(rows, read(cache), strict=True):
        tensor[[1, 2]] = tensor[[2, 1]]
        assert (found == tensor).all()
    cache.clear(2)
    for tensor, found in zip(rows, read(cache), strict=True):
        tensor[2] = 0
        assert (found == tensor).all()


@pytest.mark.parametrize("length", [80, 66])
def test_new_positions_are_written_where_they_belong(length: int) -> None:
    """In 8 bits, to rows that have other lengths; what stands around them stays."""
    shapes = [CacheTensor(heads=2, head_dim=16), CacheTensor(heads=3, head_dim=6)]
    cache = DeviceKVCache(kernel_device(), shapes, np.int8, 4, length, new_positions=3 * 5)
    rows, generator = fill(cache, np.random.default_rng(length)), np.random.default_rng(1)
    indices = kernel_device().zeros((3,), np.int64)
    for first, query_len, starts in ((0, 5, (0, 17, length - 5)), (1, 1, (3, 2, 1)), (1, 4, (8, 0, 60))):
        kernel_device().write(indices, np.array(starts, np.int64))
        for tensor, new, shape in zip(rows, cache.new(), shapes, strict=True):
            values = generator.integers(-128, 128, (3, shape.heads, query_len, shape.head_dim)).astype(np.int8)
            kernel_device().write(new.part(0, values.shape), values)
            for row, start in enumerate(starts):
                tensor[first + row, :, start : start + query_len] = values[row]
        cache.write_new(first, indices, query_len)
        for tensor, found in zip(rows, read(cache), strict=True):
            assert (found == tensor).all()
    with pytest.raises(ValueError, match="3 rows of 6 new positions: there is room for 15"):
        cache.write_new(0, indices, 6)


def test_blocks_beyond_the_end_of_a_row() -> None:
    cache = DeviceKVCache(kernel_device(), SHAPES, np.float32, ROWS, 60)
    cache.allocate_pool(1)
    with pytest.raises(ValueError, match="4 blocks from position 0 do not fit into 60 positions"):
        cache.load(0, 0, [0] * 4)
