"""A key-value cache in device memory (the host build's, or a GPU's; see ``kernel_device``) against numpy slices."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from specrun.engine_dir import CacheTensor
from specrun.kv_cache import BLOCK
from specrun.kv_cache.device import DeviceKVCache
from tests.host_device import kernel_device

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


def test_blocks_beyond_the_end_of_a_row() -> None:
    cache = DeviceKVCache(kernel_device(), SHAPES, np.float32, ROWS, 60)
    cache.allocate_pool(1)
    with pytest.raises(ValueError, match="4 blocks from position 0 do not fit into 60 positions"):
        cache.load(0, 0, [0] * 4)
