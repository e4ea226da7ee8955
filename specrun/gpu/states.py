"""What recurrent layers keep of rows in device memory; see ``contract``.

TensorRT updates nothing but keys and values in place. So a pass leaves its states in memory of their own, and a kernel
copies them to the rows behind it. A pass of B rows copies what B rows keep, once. Two memories that take turns would
need no copy. But a row that does not decode must keep its states while other rows go on, and every captured round
would be needed once for each turn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from specrun.devices import Device, DeviceArray
from specrun.engine_dir.cache_tensors import StateTensor
from specrun.engine_dir.contract import KEEP_INDICES, STATE_INDICES
from specrun.gpu.kernels import calls
from specrun.gpu.kernels.layout import CACHE_TENSOR


class DeviceStates:
    """The states of ``rows`` rows, how many tokens they have read, and a pool of places for states that are kept.

    The first are float32 [rows, *row_shape] for each StateTensor, the second int64 [rows], which is kept like a state:
    it is cleared, moved and copied with them. A pass leaves it in ``keep_indices``.
    """

    def __init__(self, device: Device, states: Sequence[StateTensor], replays: int, rows: int) -> None:
        """replays: how many tokens can be read again. Raises BackendError where memory is short."""
        shapes = [state.row_shape(replays) for state in states]
        self._state_indices, self._keep_indices = (device.zeros((rows,), np.int64) for _ in range(2))
        self._device = device
        self._past_names = [state.past_name for state in states]
        self._present_names = [state.present_name for state in states]
        self._replays = replays
        self._read = device.zeros((rows,), np.int64)
        self._advances = device.zeros((rows,), np.int32)
        """[rows]: 1 for each row of a pass whose result becomes its state, else 0."""
        self._tensors = [*(device.zeros((rows, *shape), np.float32) for shape in shapes), self._read]
        self._left = [*(device.zeros((rows, *shape), np.float32) for shape in shapes), self._keep_indices]
        self._pool: list[DeviceArray] = []
        sizes = [tensor.nbytes // rows for tensor in self._tensors]
        self._largest = max(sizes)
        self._table = device.zeros((len(sizes),), CACHE_TENSOR)
        content = [
            (tensor.address, left.address, 1, size)
            for tensor, left, size in zip(self._tensors, self._left, sizes, strict=True)
        ]
        device.write(self._table, np.array(content, CACHE_TENSOR))

    def allocate_pool(self, places: int) -> None:
        """Allocate a pool of ``places`` places."""
        if places:
            self._pool = [self._device.zeros((places, *one.shape[1:]), one.dtype) for one in self._tensors]

    def bound(self, first: int) -> dict[str, DeviceArray]:
        """The memory that a pass over rows from ``first`` on reads and writes, by the contract's names."""
        past = [_row(tensor, first) for tensor in self._tensors[:-1]]
        bound = {STATE_INDICES: self._state_indices, KEEP_INDICES: self._keep_indices}
        bound |= zip(self._past_names, past, strict=True)
        bound |= zip(self._present_names, self._left[:-1], strict=True)
        return bound

    def clear(self, row: int) -> None:
        """Write zeros to the states of ``row``, which have read nothing then."""
        for tensor in self._tensors:
            self._device.clear(_row(tensor, row))

    def swap(self, one: int, other: int) -> None:
        """Exchange two rows."""
        calls.swap_rows(
            self._device,
            tensors=self._table,
            length=1,
            one=one,
            other=other,
            positions=1,
            heads=1,
            size=self._largest,
        )

    def save(self, row: int, place: int) -> None:
        """Copy the states of ``row`` to a ``place`` of the pool."""
        for tensor, pool in zip(self._tensors, self._pool, strict=True):
            self._device.copy(_row(pool, place), _row(tensor, row))

    def load(self, row: int, place: int) -> None:
        """Copy a ``place`` of the pool to the states of ``row``."""
        for tensor, pool in zip(self._tensors, self._pool, strict=True):
            self._device.copy(_row(tensor, row), _row(pool, place))

    def write_indices(self, state_indices: npt.NDArray[np.int64], keep_indices: npt.NDArray[np.int64]) -> None:
        """Say to a pass of prompts what its rows' states have read, and are to read: int64 [B] each."""
        shape = state_indices.shape
        self._device.write(self._state_indices.part(0, shape), state_indices)
        self._device.write(self._keep_indices.part(0, shape), keep_indices)
        self._device.write(self._advances.part(0, shape), np.ones(shape, np.int32))

    def begin(self, rows: calls.RowState, write_indices: DeviceArray, held_back: int) -> None:
        """Queue that a pass of a round is told what the states of rows 0 .. B have read, and are to read.

        write_indices: the pass's, int64 [B]. held_back: how many of a row's committed tokens they do not read yet.
        """
        calls.begin_states(
            rows,
            write_indices=write_indices,
            read=self._read,
            held_back=held_back,
            replays=self._replays,
            state_indices=self._state_indices,
            keep_indices=self._keep_indices,
            advances=self._advances,
        )

    def take(self, first: int, batch: int) -> None:
        """Queue that what a pass over ``batch`` rows from ``first`` on has left becomes their states."""
        calls.take_states(
            self._device, tensors=self._table, first=first, batch=batch, advances=self._advances, size=self._largest
        )


def _row(tensor: DeviceArray, row: int) -> DeviceArray:
    shape = tensor.shape[1:]
    return tensor.part(row * math.prod(shape), shape)
