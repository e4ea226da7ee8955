"""The layout of weights in specrun's own CUDA kernels: see ``Weight`` in decoder.cu.

A weight [N, K] is stored in tiles of 16 x 16. Each of the 32 lanes of a warp has 8 numbers of a tile: lane 4 g + t has
those of rows g and g + 8 in columns 2 t and 2 t + 1, then of the same rows 8 columns further. It reads 16 bytes at
once: 16-bit numbers of a tile, 8-bit codes of two tiles, or 4-bit codes of four.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from specbuild.compilers.cpu.products import PackedWeight, PackWeights, Weight
from specbuild.graph import ops as graphs
from specbuild.weights.packed import Floats, as_float32, lazy
from specrun.engine_dir.layers import STEPS, TILE

_PART = 1024
"""Number of rows that are packed at a time, so that no whole weight is copied."""
_MIDDLE = {ir.DataType.UINT4: 8, ir.DataType.UINT8: 128}
"""Number that is subtracted from codes, so that they are signed."""


class UnsupportedWeightError(Exception):
    """A weight in a format that the kernels do not support."""


def pack_for_gpu(dtype: ir.DataType) -> PackWeights:
    """The function that packs weights of an engine in float16 or bfloat16. It raises UnsupportedWeightError."""

    def pack(graph: ir.Graph, weights: Sequence[Weight], block: int) -> PackedWeight:
        first, (inputs, _) = weights[0], weights[0].shape
        bits, name = (16 if first.bits == 32 else first.bits), weights[0].name
        if first.block % TILE:
            raise UnsupportedWeightError(f"{name}: groups of {first.block}, which are no multiple of {TILE}")
        group = TILE if first.block % (2 * TILE) else 2 * TILE
        rows = sum(-(-weight.shape[1] // TILE) for weight in weights)
        steps = -(-inputs // (TILE * STEPS[bits]))
        sizes: dict[str, int | list[int]] = {"K": inputs, "N": [weight.shape[1] for weight in weights], "bits": bits}

        def joined(role: str, kind: ir.DataType, shape: Sequence[int], read: Callable[[Weight], Any]) -> ir.Value:
            tensor = lazy(kind, shape, lambda: np.concatenate([read(weight) for weight in weights]), f"{name}.{role}")
            return graphs.initializer(graph, f"{name}.{role}", tensor)

        if bits == 16:
            read = functools.partial(_numbers, to_bits=_TO_BITS[dtype])
            return PackedWeight(joined("tiles", ir.DataType.UINT16, [rows, steps, TILE * TILE], read), [], None, sizes)
        tiles = joined("tiles", ir.DataType.UINT8, [rows, steps, 2 * TILE * TILE], _codes)
        per_step = TILE * STEPS[bits] // group
        groups = [rows, steps, TILE * per_step]

        def by_tiles(role: str, read: Callable[[_Groups], npt.NDArray[np.float16]]) -> ir.Value:
            kind = ir.DataType.UINT16
            return joined(role, kind, groups, lambda weight: _by_tiles(read(_groups(weight, group)), per_step))

        scales = by_tiles("scales", lambda values: values.scales)
        units = joined("units", ir.DataType.FLOAT, [rows * TILE], lambda weight: _padded(_groups(weight, group).units))
        offsets = by_tiles("offsets", lambda values: values.offsets) if _has_offsets(first) else None
        sizes |= {"group": group, "has_floats": int(first.has_floats)}
        return PackedWeight(tiles, [scales, units, offsets], None, sizes)

    return pack


def pack_table(table: ir.TensorProtocol, dtype: ir.DataType) -> ir.LazyTensor:
    """Pack a table [N, K] that belongs to no product."""
    rows, columns = (int(size) for size in table.shape.numpy())
    shape = [-(-rows // TILE), -(-columns // TILE), TILE * TILE]
    return lazy(ir.DataType.UINT16, shape, lambda: pack_tiles(as_float32(table), _TO_BITS[dtype]))


def pack_tiles(weight: npt.NDArray[Any], to_bits: Callable[[Any], npt.NDArray[np.uint16]]) -> npt.NDArray[np.uint16]:
    """Pack numbers [N, K] of 16 bits as [N / 16, K / 16, 256], padded with zeros."""
    return _in_parts(weight, lambda part: _lanes(to_bits(np.ascontiguousarray(part)), 1), np.uint16, 16)


def _numbers(weight: Weight, to_bits: Callable[[Floats], npt.NDArray[np.uint16]]) -> npt.NDArray[np.uint16]:
    numbers = as_float32(weight.codes)
    return pack_tiles(numbers if weight.is_transposed else numbers.T, to_bits)


def _codes(weight: Weight) -> npt.NDArray[np.uint8]:
    """Codes as [N / 16, steps, 512]: bytes, or words of a tile's 8 codes, in which pairs are 16 bits apart."""
    codes, bits = np.asarray(weight.codes.numpy()), weight.bits
    has_floats, middle = weight.has_floats, _MIDDLE.get(weight.codes.dtype, 0)

    def pack(part: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
        numbers = part if has_floats else (part.astype(np.int16) - middle).astype(np.int8)
        lanes = _lanes(numbers.view(np.uint8), STEPS[bits])
        if bits == 8:
            return lanes
        shifts = 4 * np.arange(4, dtype=np.uint32)[:, None] + np.array([0, 16], np.uint32)
        nibbles = (lanes if has_floats else lanes + 8) & 15
        words = (nibbles.astype(np.uint32) << shifts).sum(axis=(-2, -1), dtype=np.uint32)
        return np.asarray(words.view(np.uint8))

    return _in_parts(codes if weight.is_transposed else codes.T, pack, np.uint8, bits)


def _in_parts(
    weight: npt.NDArray[Any], pack: Callable[[Any], npt.NDArray[Any]], dtype: npt.DTypeLike, bits: int
) -> npt.NDArray[Any]:
    """Pack [N, K] as [N / 16, steps, 512 bytes], some rows at a time."""
    rows, columns = weight.shape
    steps = -(-columns // (TILE * STEPS[bits]))
    packed = np.empty((-(-rows // TILE), steps, 2 * TILE * TILE // np.dtype(dtype).itemsize), dtype)
    for first in range(0, rows, _PART):
        part = pack(weight[first : first + _PART])
        packed[first // TILE :][: len(part)] = part.reshape(len(part), steps, -1)
    return packed


def _lanes(part: npt.NDArray[Any], tiles: int) -> npt.NDArray[Any]:
    """[N, K] as [N / 16, steps, g, t, tile, register, number], in the order in which lanes read ``tiles`` tiles."""
    part = np.pad(part, [(0, -part.shape[0] % TILE), (0, -part.shape[1] % (TILE * tiles))])
    # Row tile, half, g; step, tile, half, t, number.
    lanes = part.reshape(len(part) // TILE, 2, 8, -1, tiles, 2, 4, 2).transpose(0, 3, 2, 6, 4, 5, 1, 7)
    return np.ascontiguousarray(lanes.reshape(*lanes.shape[:5], 4, 2))


class _Groups(NamedTuple):
    """A weight's numbers are unit * (scale * code + offset), with signed codes."""

    scales: npt.NDArray[np.float16]
    """[K / group, N]"""
    units: Floats
    """[N], powers of two, so that scales and offsets of a row fit into float16"""
    offsets: npt.NDArray[np.float16]
    """[K / group, N]"""


def _has_offsets(weight: Weight) -> bool:
    return weight.minima is not None or weight.zeros is not None or weight.codes.dtype in _MIDDLE


def _groups(weight: Weight, group: int) -> _Groups:
    assert weight.scales is not None
    inputs, outputs = weight.shape
    scales = np.broadcast_to(weight.scales.numbers(), (weight.scale_blocks, outputs))
    offsets = np.zeros((1, outputs), np.float32)
    if _has_offsets(weight):
        zeros = np.zeros((), np.float32) if weight.zeros is None else as_float32(weight.zeros)
        offsets = (_MIDDLE.get(weight.codes.dtype, 0) - (zeros.T if weight.is_transposed else zeros)) * scales
        if weight.minima is not None:
            offsets = offsets + weight.minima.numbers()
    count = -(-inputs // group)
    times = weight.block // group or count
    repeated = [np.repeat(np.broadcast_to(values, scales.shape), times, axis=0) for values in (scales, offsets)]
    largest = np.maximum(*(np.abs(values).max(axis=0) for values in (scales, offsets)))
    units = np.exp2(np.ceil(np.log2(np.where(largest > 0, largest, 1)))).astype(np.float32)
    group_scales, group_offsets = ((values[:count] / units).astype(np.float16) for values in repeated)
    return _Groups(group_scales, units, group_offsets)


def _by_tiles(values: npt.NDArray[np.float16], groups: int) -> npt.NDArray[np.uint16]:
    """[K / group, N] as [N / 16, steps, 16 * groups of a step]: rows g and g + 8 alternate."""
    padded = np.pad(values.view(np.uint16).T, [(0, -values.shape[1] % TILE), (0, -len(values) % groups)])
    tiles = padded.reshape(len(padded) // TILE, 2, 8, -1, groups).transpose(0, 3, 2, 1, 4)
    return np.ascontiguousarray(tiles.reshape(*tiles.shape[:2], -1))


def _padded(units: Floats) -> Floats:
    return np.pad(units, (0, -len(units) % TILE))


def _float16_bits(values: Floats) -> npt.NDArray[np.uint16]:
    return values.astype(np.float16).view(np.uint16)


def _bfloat16_bits(values: Floats) -> npt.NDArray[np.uint16]:
    """Exact for numbers that were bfloat16; others are rounded to the nearest, a tie to even."""
    bits = values.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + (bits >> 16 & 1)) >> 16).astype(np.uint16)


_TO_BITS = {ir.DataType.FLOAT16: _float16_bits, ir.DataType.BFLOAT16: _bfloat16_bits}
