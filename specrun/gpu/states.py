"""The states of recurrent layers in device memory; see ``contract``.

TensorRT updates only keys and values in place. So a pass writes its states to separate memory, and a kernel then copies
them to the rows. A pass of B rows copies the states of B rows, once. Double buffering would need no copy. But a row
that does not decode must keep its states while other rows go on, and every round would have to be captured for both
buffers.
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
    """The states of ``rows`` rows, how many tokens they have read, and a pool of slots for states that are kept.

    The states are float32 [rows, *row_shape] for each StateTensor. The counts are int64 [rows] and treated like a
    state: they are cleared, moved and copied with them. A pass writes them to ``keep_indices``.
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
        """[rows] int32: 1 for each row of a pass whose result becomes its state, else 0."""
        self._tensors = [*(device.zeros((rows, *shape), np.float32) for shape in shapes), self._read]
        self._present = [*(device.zeros((rows, *shape), np.float32) for shape in shapes), self._keep_indices]
        self._pool: list[DeviceArray] = []
        sizes = [tensor.nbytes // rows for tensor in self._tensors]
        self._largest = max(sizes)
        self._table = device.zeros((len(sizes),), CACHE_TENSOR)
        content = [
            (tensor.address, present.address, 1, size)
            for tensor, present, size in zip(self._tensors, self._present, sizes, strict=True)
        ]
        device.write(self._table, np.array(content, CACHE_TENSOR))

    def allocate_pool(self, slots: int) -> None:
        """Allocate a pool of ``slots`` slots."""
        if slots:
            self._pool = [self._device.zeros((slots, *tensor.shape[1:]), tensor.dtype) for tensor in self._tensors]

    def bound(self, first: int) -> dict[str, DeviceArray]:
        """The memory that a pass over rows from ``first`` on reads and writes, by the contract's names."""
        past = [_row(tensor, first) for tensor in self._tensors[:-1]]
        bound = {STATE_INDICES: self._state_indices, KEEP_INDICES: self._keep_indices}
        bound |= zip(self._past_names, past, strict=True)
        bound |= zip(self._present_names, self._present[:-1], strict=True)
        return bound

    def clear(self, row: int) -> None:
        """Write zeros to the states of ``row`` and to its count."""
        for tensor in self._tensors:
            self._device.clear(_row(tensor, row))

    def swap(self, row: int, other: int) -> None:
        """Exchange two rows."""
        calls.swap_rows(
            self._device,
            tensors=self._table,
            length=1,
            row=row,
            other=other,
            positions=1,
            heads=1,
            size=self._largest,
        )

    def save(self, row: int, slot: int) -> None:
        """Copy the states of ``row`` to a ``slot`` of the pool."""
        for tensor, pool in zip(self._tensors, self._pool, strict=True):
            self._device.copy(_row(pool, slot), _row(tensor, row))

    def load(self, row: int, slot: int) -> None:
        """Copy a ``slot`` of the pool to the states of ``row``."""
        for tensor, pool in zip(self._tensors, self._pool, strict=True):
            self._device.copy(_row(tensor, row), _row(pool, slot))

    def write_indices(self, state_indices: npt.NDArray[np.int64], keep_indices: npt.NDArray[np.int64]) -> None:
        """Write the ``state_indices`` and ``keep_indices`` of a pass of prompts, int64 [B] each."""
        shape = state_indices.shape
        self._device.write(self._state_indices.part(0, shape), state_indices)
        self._device.write(self._keep_indices.part(0, shape), keep_indices)
        self._device.write(self._advances.part(0, shape), np.ones(shape, np.int32))

    def begin(self, rows: calls.RowState, write_indices: DeviceArray, held_back: int) -> None:
        """Queue the ``state_indices`` and ``keep_indices`` of a round's pass over rows 0 .. B.

        write_indices: the pass's, int64 [B]. held_back: number of a row's last committed tokens that it does not read.
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
        """Queue a copy of the states that a pass has written to its ``batch`` rows from ``first`` on."""
        calls.take_states(
            self._device, tensors=self._table, first=first, batch=batch, advances=self._advances, size=self._largest
        )


def _row(tensor: DeviceArray, row: int) -> DeviceArray:
    shape = tensor.shape[1:]
    return tensor.part(row * math.prod(shape), shape)
