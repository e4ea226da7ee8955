"""States of recurrent layers in device memory (the host build's, or a GPU's; see ``kernel_device``) against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from specrun.devices import DeviceArray
from specrun.engine_dir.cache_tensors import StateTensor
from specrun.engine_dir.contract import KEEP_INDICES, STATE_INDICES
from specrun.gpu.kernels import calls
from specrun.gpu.kernels.layout import PROGRESS
from specrun.gpu.states import DeviceStates
from tests.helpers.host_device import call, fetched, kernel_device

STATES = [
    StateTensor(layer=0, part="state", shape=[4, 16, 16]),
    StateTensor(layer=0, part="inputs", shape=[35], history=0),
    StateTensor(layer=2, part="convolution.0", shape=[3], history=3),
]
REPLAYS, ROWS = 16, 4


class Kept:
    """States with random contents, and what they hold by numpy's account."""

    def __init__(self) -> None:
        self.states = DeviceStates(kernel_device(), STATES, REPLAYS, ROWS)
        self.states.allocate_pool(2)
        generator = np.random.default_rng(3)
        self.rows = [self._fill(array, generator) for array in self._rows()]
        self.left = [self._fill(array, generator) for array in self._left()]

    def _rows(self) -> list[DeviceArray]:
        bound = self.states.bound(0)
        return [self._whole(bound[state.past_name]) for state in STATES] + [self.states._read]

    def _left(self) -> list[DeviceArray]:
        bound = self.states.bound(1)
        return [bound[state.present_name] for state in STATES] + [bound[KEEP_INDICES]]

    def _whole(self, row: DeviceArray) -> DeviceArray:
        return DeviceArray(row.address, (ROWS, *row.shape), row.dtype)

    def _fill(self, array: DeviceArray, generator: np.random.Generator) -> npt.NDArray[Any]:
        values = generator.integers(1, 1 << 15, array.shape).astype(array.dtype)
        kernel_device().write(array, values)
        return values

    def check(self) -> None:
        for array, values in zip(self._rows(), self.rows, strict=True):
            assert (fetched(kernel_device(), array) == values).all()


def test_rows_are_cleared_moved_and_kept() -> None:
    """With how many tokens they have read; what is not touched stays."""
    kept = Kept()
    kept.states.save(1, 1)
    kept.states.save(3, 0)
    first, third = ([rows[number].copy() for rows in kept.rows] for number in (1, 3))
    kept.states.swap(1, 2)
    kept.states.clear(3)
    for rows in kept.rows:
        rows[[1, 2]] = rows[[2, 1]]
        rows[3] = 0
    kept.check()
    kept.states.load(0, 1)
    kept.states.load(2, 0)
    for rows, one, other in zip(kept.rows, first, third, strict=True):
        rows[0], rows[2] = one, other
    kept.check()


@pytest.mark.parametrize("first, advances", [(0, [1, 0, 1, 1]), (1, [1, 1, 0]), (2, [0, 1])])
def test_a_pass_leaves_its_states_to_the_rows_that_advance(first: int, advances: list[int]) -> None:
    kept = Kept()
    kernel_device().write(kept.states._advances.part(0, (len(advances),)), np.array(advances, np.int32))
    kept.states.take(first, len(advances))
    for rows, left in zip(kept.rows, kept.left, strict=True):
        for row, advance in enumerate(advances):
            if advance:
                rows[first + row] = left[row]
    kept.check()


def test_a_prompts_pass_reads_and_keeps_what_the_host_says() -> None:
    kept = Kept()
    told = np.array([3, 0, 32], np.int64), np.array([16, 0, 48], np.int64)
    kept.states.write_indices(*told)
    bound = kept.states.bound(1)
    for name, values in zip((STATE_INDICES, KEEP_INDICES), told, strict=True):
        assert (fetched(kernel_device(), bound[name].part(0, (3,))) == values).all()
    kept.states.take(1, 3)
    for rows, left in zip(kept.rows[:-1], kept.left, strict=False):
        rows[1:] = left[:3]
    kept.rows[-1][1:] = told[1]
    kept.check()


def test_what_a_round_reads_and_keeps() -> None:
    """Rows that decode read on to their committed tokens, less those that are fed again; others are not looked at."""
    progress = np.array([(40, 5), (40, 5), (1, 9), (40, 0), (40, 3), (40, 3), (40, 3)], PROGRESS)
    write = np.array([39, 38, 0, 39, 39, 60, 39], np.int64)
    read = np.array([32, 38, 0, 32, 22, 32, 40], np.int64)  # The last three: too far behind, or ahead.
    expected = {
        0: ([32, 38, 0, 39, 39, 60, 39], [40, 40, 1, 39, 39, 60, 39]),
        1: ([32, 38, 0, 39, 39, 60, 39], [39, 39, 0, 39, 39, 60, 39]),
        4: ([32, 38, 0, 39, 39, 60, 39], [36, 38, 0, 39, 39, 60, 39]),
    }
    for held_back, (states, keeps) in expected.items():
        state, keep = np.full((2, 7), -1, np.int64)
        advances = np.full(7, -1, np.int32)
        call(
            calls.begin_states,
            {"progress": progress},
            write_indices=write,
            read=read,
            held_back=held_back,
            replays=REPLAYS,
            state_indices=state,
            keep_indices=keep,
            advances=advances,
        )
        assert (state.tolist(), keep.tolist(), advances.tolist()) == (states, keeps, [1, 1, 1, 0, 0, 0, 0])
