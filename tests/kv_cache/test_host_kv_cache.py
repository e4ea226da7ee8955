"""A key-value cache in host memory against one array for each of its rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from specrun.engine_dir.cache_tensors import CacheTensor
from specrun.kv_cache.host import HostKVCache

SHAPES = [CacheTensor(heads=2, head_dim=8), CacheTensor(heads=3, head_dim=5), CacheTensor(heads=1, head_dim=1)]

Row = list[npt.NDArray[Any]]


def read(cache: HostKVCache, row: int) -> Row:
    return [tensor[0].copy() for tensor in cache.part(row, 1)]


@pytest.mark.parametrize("storage", [np.float32, np.int8])
@pytest.mark.parametrize("seed", range(20))
def test_rows_keep_what_they_hold_while_the_shape_grows_and_they_change_places(
    seed: int, storage: type[np.generic]
) -> None:
    """And behind it, nothing of others: what is no number there would become the row's own."""
    generator = np.random.default_rng(seed)
    cache = HostKVCache(SHAPES, storage, 0)
    for _ in range(4):  # Memory of the last turn serves again.
        rows, length, used = 1, int(generator.integers(1, 9)), 0
        cache.resize(rows, length, 0)
        held: list[Row] = []
        for _ in range(12):
            what = generator.choice(["join", "grow", "swap", "clear"])
            if what == "join":
                rows, length = max(rows, used + 1), length + int(generator.integers(0, 3))
                cache.resize(rows, length, used)
                for tensor in cache.part(used, 1):
                    tensor[...] = generator.normal(size=tensor.shape, scale=30).astype(storage)
                held = [grown(row, length) for row in held] + [read(cache, used)]
                used += 1
            elif what == "grow" and used:
                rows, length = rows + int(generator.integers(0, 3)), length + int(generator.integers(0, 9))
                cache.resize(rows, length, used)
                held = [grown(row, length) for row in held]
            elif what == "swap" and used:
                one, other = (int(row) for row in generator.integers(0, used, 2))
                cache.swap(one, other, (length, length))
                held[one], held[other] = held[other], held[one]
            elif what == "clear" and used:
                row = int(generator.integers(0, used))
                cache.clear(row)
                held[row] = [0 * tensor for tensor in held[row]]
            for number, kept in enumerate(held):
                for found, expected in zip(read(cache, number), kept, strict=True):
                    np.testing.assert_array_equal(found, expected)


def grown(row: Row, length: int) -> Row:
    return [np.pad(tensor, ((0, 0), (0, length - tensor.shape[1]), (0, 0))) for tensor in row]


@pytest.mark.parametrize("held", [(0, 3), (3, 0), (2, 5), (6, 6)])
def test_rows_change_places_as_far_as_they_matter(held: tuple[int, int]) -> None:
    cache = HostKVCache(SHAPES, np.float32, 0)
    cache.resize(3, 6, 0)
    for tensor in cache.part(0, 3):
        tensor[...] = np.random.default_rng(1).normal(size=tensor.shape)
    before = [read(cache, row) for row in range(3)]
    cache.swap(2, 0, held)
    ours, theirs = held
    for first, middle, last, *old in zip(*(read(cache, row) for row in range(3)), *before, strict=True):
        np.testing.assert_array_equal(first[:, :ours], old[2][:, :ours])
        np.testing.assert_array_equal(last[:, :theirs], old[0][:, :theirs])
        np.testing.assert_array_equal(middle, old[1])


def test_what_no_engine_reads_is_not_zeroed() -> None:
    """But states are. Rows that are in use keep what they hold."""
    cache = HostKVCache(SHAPES, np.float32, 0, [(3,)], reads_hidden=False)
    cache.resize(2, 6, 0)
    for tensor in (*cache.part(0, 2), *cache.states(0, 2)):
        tensor[...] = np.random.default_rng(1).normal(size=tensor.shape)
    before = read(cache, 1)
    cache.clear(1)
    assert not cache.states(1, 1)[0].any() and cache.states(0, 1)[0].all()
    cache.resize(3, 9, 2)
    for found, expected in zip(read(cache, 1), before, strict=True):
        np.testing.assert_array_equal(found[:, :6], expected)


def test_rows_in_use_do_not_shrink() -> None:
    cache = HostKVCache(SHAPES, np.float32, 0)
    cache.resize(2, 8, 0)
    for rows, length in ((1, 8), (2, 7)):
        with pytest.raises(ValueError, match="2 rows of 8 positions"):
            cache.resize(rows, length, 1)
