"""The layout of weights in specrun's own CPU operators: see ``Weight`` in ``matmul.h``.

Columns are in panels of 16. A line of 64 bytes holds one input of a panel's columns in float32, 4 inputs in 8 bits
each, or 8 in 4 bits: the first four in the low half of each byte. Codes are unsigned, with 128 or 8 in the middle.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

COLUMNS = 16
"""Number of columns of a panel."""
_LINE = 64
_PART = 1024
"""Columns that are laid out at a time, so that no copies of a whole weight are made on the way."""


def line_inputs(bits: int) -> int:
    """Inputs in a line."""
    return 8 if bits == 4 else 4


def packed_shape(rows: int, columns: int, bits: int) -> tuple[int, int, int]:
    """[panels, lines, 64] of a weight of [K, N]."""
    return -(-columns // COLUMNS), -(-rows // line_inputs(bits)), _LINE


def pack_codes(codes: npt.NDArray[Any], bits: int) -> npt.NDArray[np.uint8]:
    """Codes [K, N], signed or not, as uint8 of ``packed_shape``."""
    rows, columns = codes.shape
    packed = np.empty(packed_shape(rows, columns, bits), np.uint8)
    for first in range(0, columns, _PART):
        part = _pack(_unsigned(codes[:, first : first + _PART], bits), bits)
        packed[first // COLUMNS :][: len(part)] = part
    return packed


def pack_floats(weight: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Numbers [K, N] as [panels, K, 16], with zeros behind the last column."""
    rows, columns = weight.shape
    packed = np.zeros((-(-columns // COLUMNS), rows, COLUMNS), np.float32)
    full = columns // COLUMNS
    packed[:full] = weight[:, : full * COLUMNS].reshape(rows, full, COLUMNS).swapaxes(0, 1)
    packed[full:, :, : columns % COLUMNS] = weight[:, full * COLUMNS :]
    return packed


def by_strips(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Scales or the like [blocks, N] as [panels, blocks, 16], with zeros behind the last column."""
    blocks, columns = values.shape
    padded = np.pad(values, ((0, 0), (0, -columns % COLUMNS)))
    return np.ascontiguousarray(padded.reshape(blocks, -1, COLUMNS).swapaxes(0, 1))


def _unsigned(codes: npt.NDArray[Any], bits: int) -> npt.NDArray[np.uint8]:
    if codes.dtype.name.startswith("u"):
        return codes.astype(np.uint8)
    return codes.astype(np.int8).view(np.uint8) + np.uint8(8 if bits == 4 else 128)


def _pack(codes: npt.NDArray[np.uint8], bits: int) -> npt.NDArray[np.uint8]:
    step = line_inputs(bits)
    padded = np.pad(codes, [(0, -size % unit) for size, unit in zip(codes.shape, (step, COLUMNS), strict=True)])
    groups = padded.reshape(len(padded) // step, step // 4, 4, -1, COLUMNS).transpose(3, 0, 4, 2, 1)
    lines = groups[..., 0] if bits == 8 else groups[..., 0] | np.left_shift(groups[..., 1], 4, dtype=np.uint8)
    return lines.reshape(*lines.shape[:2], _LINE)
