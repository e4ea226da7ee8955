"""The layout of weights in specrun's own CUDA kernels: see ``multiply_tile`` in decoder.cu.

A weight [N, K] lies in tiles of 16 x 16. Each of the 32 lanes of a warp reads 16 bytes: of lane 4 g + t, rows g and
g + 8, columns 2 t and 2 t + 1, then the same rows 8 columns further.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from specbuild.compilers.cpu.products import FloatLayout
from specrun.engine_dir.layers import TILE

Floats = npt.NDArray[np.float32]
_PART = 1024
"""Rows that are laid out at a time, so that no copies of a whole weight are made on the way."""


def tile_layout(dtype: ir.DataType) -> FloatLayout:
    """The layout of weights in float16 or bfloat16, as uint16."""

    def pack(weight: Floats) -> npt.NDArray[np.uint16]:
        return pack_tiles(weight.T, _TO_BITS[dtype])

    return FloatLayout(ir.DataType.UINT16, lambda inputs: (-(-inputs // TILE), TILE * TILE), pack)


def pack_tiles(weight: Floats, to_bits: Callable[[Floats], npt.NDArray[np.uint16]]) -> npt.NDArray[np.uint16]:
    """Numbers [N, K] as [N / 16, K / 16, 256], with zeros behind the last row and column."""
    rows, columns = weight.shape
    tiles = np.empty((-(-rows // TILE), -(-columns // TILE), TILE * TILE), np.uint16)
    for first in range(0, rows, _PART):
        part = to_bits(np.ascontiguousarray(weight[first : first + _PART]))
        part = np.pad(part, [(0, -size % TILE) for size in part.shape])
        # Row tile, half, g; column tile, half, t, number.
        apart = part.reshape(-1, 2, 8, tiles.shape[1], 2, 4, 2).transpose(0, 3, 2, 5, 4, 1, 6)
        tiles[first // TILE :][: len(apart)] = apart.reshape(len(apart), -1, TILE * TILE)
    return tiles


def _float16_bits(values: Floats) -> npt.NDArray[np.uint16]:
    return values.astype(np.float16).view(np.uint16)


def _bfloat16_bits(values: Floats) -> npt.NDArray[np.uint16]:
    """Exact for numbers that were bfloat16; others are rounded to the nearest, a tie to even."""
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16).astype(np.uint16)


_TO_BITS = {ir.DataType.FLOAT16: _float16_bits, ir.DataType.BFLOAT16: _bfloat16_bits}
