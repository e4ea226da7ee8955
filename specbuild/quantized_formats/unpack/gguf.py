"""The blocks of GGUF files as ``Packed``: codes, scales and minima as they are, so that all numbers stay the same.

A block has the codes of 32 or 256 input channels of one output channel, and their scales. In K formats scales and
minima of groups are codes themselves, with a float for each block. The layouts: ggml-common.h and ggml-quants.c of
ggml.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from specbuild.quantized_formats.formats import Form
from specbuild.quantized_formats.unpack.stored import UINT8, Array, Bytes, CodeTensor, Module, NumpyTensor, Ranges
from specbuild.weights.gguf_file import BLOCKS
from specbuild.weights.packed import Packed, lazy

SUFFIX = "gguf"
"""Word in place of ``weight`` in the name of a tensor of blocks [N, bytes of a row]."""
_CHUNK = 1 << 24
"""Bytes of blocks that are looked at at a time."""

Unpack = Callable[[Bytes], Array]
"""Takes blocks [.., bytes] and gives numbers [.., n] of each."""


@dataclass(frozen=True)
class _Values:
    """Scales, minima or units of blocks."""

    dtype: ir.DataType
    unpack: Unpack
    """[.., groups], or of units [.., 1]."""


@dataclass(frozen=True)
class _Kind:
    """How blocks are read."""

    codes: ir.DataType
    group: int
    """Channels that share a scale."""
    unpack: Unpack
    """[.., channels of a block]: each code in the low bits of a byte."""
    scales: _Values
    units: _Values | None = None
    """Units of int8 scales; None if the scales are floating point."""
    minima: _Values | None = None
    minimum_units: _Values | None = None


def gguf(module: Module, form: Form) -> Packed:
    """``gguf`` uint8 [N, bytes of a row]: blocks of the type that ``form.reader`` names.

    ``form.heads``: llama.cpp keeps output channels of Llama's queries and keys in pairs, one of each half of a head.
    ``form.is_table``: rows are looked up; they stay rows. Raises CheckpointError.
    """
    stored = module.matrix(SUFFIX, dtypes=(UINT8,))
    numbers, size = BLOCKS[form.reader]
    outputs, row_bytes = stored.shape
    if row_bytes % size or (form.heads and outputs % (2 * form.heads)):
        raise module.error(f"{stored.name} of shape {list(stored.shape)} is not of type {form.reader}")
    kind, inputs = _KINDS[form.reader], row_bytes // size * numbers
    order = np.arange(outputs)
    if form.heads:
        order = order.reshape(form.heads, -1, 2).swapaxes(1, 2).reshape(-1)

    def by_input(ranges: Ranges) -> Iterator[Array]:
        for start, stop in ranges:
            first, last = start // numbers, -(-stop // numbers)
            part = stored.read((slice(None), slice(first * size, last * size)))
            codes = kind.unpack(part.reshape(outputs, -1, size)).reshape(outputs, -1)
            yield codes[order, start - first * numbers : stop - first * numbers].T

    def by_row(ranges: Ranges) -> Iterator[Array]:
        for start, stop in ranges:
            part = stored.read((slice(start, stop), slice(None)))
            yield kind.unpack(part.reshape(stop - start, -1, size)).reshape(stop - start, -1)

    def values(kind: _Values, each: int) -> ir.LazyTensor:
        """``each`` numbers of a block, [blocks * each, N] or [N, blocks * each]."""
        count = row_bytes // size * each

        def read() -> Array:
            matrix = np.concatenate([kind.unpack(part).reshape(len(part), -1) for part in _rows(stored, size)])
            if kind.dtype != ir.DataType.INT8 and not np.isfinite(matrix).all():
                raise module.not_finite(stored)
            return matrix if form.is_table else matrix[order].T

        return lazy(kind.dtype, (outputs, count) if form.is_table else (count, outputs), read)

    groups = numbers // kind.group
    shape = (outputs, inputs) if form.is_table else (inputs, outputs)
    return Packed(
        codes=CodeTensor(kind.codes, shape, by_row if form.is_table else by_input),
        scales=values(kind.scales, groups),
        block=kind.group,
        axis=0 if form.is_table else 1,
        scale_units=values(kind.units, 1) if kind.units else None,
        offsets=values(kind.minima, groups) if kind.minima else None,
        offset_units=values(kind.minimum_units, 1) if kind.minimum_units else None,
    )


def _rows(stored: NumpyTensor, size: int) -> Iterator[Bytes]:
    """Blocks [n, blocks of a row, bytes] of some rows at a time."""
    rows, row_bytes = stored.shape
    step = max(1, _CHUNK // row_bytes)
    for start in range(0, rows, step):
        part = stored.read((slice(start, min(rows, start + step)), slice(None)))
        yield part.reshape(len(part), -1, size)


def _fields(data: Bytes, bits: int, run: int) -> Bytes:
    """Codes of ``bits`` bits, in runs of so many bytes: all low bits of a run, then the next ones."""
    parts = data.reshape(*data.shape[:-1], -1, 1, run)
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    codes: Bytes = (parts >> shifts) & np.uint8((1 << bits) - 1)
    return codes.reshape(*data.shape[:-1], -1)


def _half(offset: int) -> _Values:
    """The float16 at a place of a block."""
    return _Values(
        ir.DataType.FLOAT16, lambda blocks: np.ascontiguousarray(blocks[..., offset : offset + 2]).view("<f2")
    )


def _unit(offset: int, sign: int = 1) -> _Values:
    """The same in float32. sign: -1 for what is subtracted."""
    half = _half(offset).unpack
    return _Values(ir.DataType.FLOAT, lambda blocks: half(blocks).astype(np.float32) * np.float32(sign))


def _high_bits(data: Bytes) -> Bytes:
    """32 bits, in the places of a code's fifth one."""
    return np.unpackbits(data, axis=-1, bitorder="little") << np.uint8(4)


def _six_bits(data: Bytes) -> tuple[Array, Array]:
    """Eight scales and eight minima of 6 bits each, in 12 bytes."""
    low, middle, high = data[..., :4], data[..., 4:8], data[..., 8:]
    scales = np.concatenate([low & 63, (high & 15) | ((low >> 2) & 48)], axis=-1)
    minima = np.concatenate([middle & 63, (high >> 4) | ((middle >> 2) & 48)], axis=-1)
    return scales, minima


def _q3_codes(blocks: Bytes) -> Array:
    return _fields(blocks[..., 32:96], 2, 32) - ((_fields(blocks[..., :32], 1, 32) ^ 1) << 2) & np.uint8(15)


def _q3_scales(blocks: Bytes) -> Array:
    low, high = _fields(blocks[..., 96:104], 4, 8), _fields(blocks[..., 104:108], 2, 4)
    return (low | high << 4) - np.uint8(32)


def _q5_codes(low: int, high: int, middle: int) -> Unpack:
    return lambda blocks: (
        (_fields(blocks[..., low : low + 16], 4, 16) | _high_bits(blocks[..., high : high + 4])) - np.uint8(middle)
    )


def _q5k_codes(blocks: Bytes) -> Array:
    return _fields(blocks[..., 48:176], 4, 32) | _fields(blocks[..., 16:48], 1, 32) << 4


def _q6_codes(blocks: Bytes) -> Array:
    return (_fields(blocks[..., :128], 4, 64) | _fields(blocks[..., 128:192], 2, 32) << 4) - np.uint8(32)


def _codes(unpack: Unpack) -> _Values:
    return _Values(ir.DataType.INT8, lambda blocks: np.ascontiguousarray(unpack(blocks)).view(np.int8))


_K_SCALES = _codes(lambda blocks: _six_bits(blocks[..., 4:16])[0])
_K_MINIMA = _codes(lambda blocks: _six_bits(blocks[..., 4:16])[1])
_K_UNITS, _K_MINIMUM_UNITS = _unit(0), _unit(2, -1)
_INT4, _UINT4, _INT8 = ir.DataType.INT4, ir.DataType.UINT4, ir.DataType.INT8
_KINDS = {
    "Q4_0": _Kind(_INT4, 32, lambda blocks: _fields(blocks[..., 2:], 4, 16) ^ 8, _half(0)),
    "Q4_1": _Kind(_UINT4, 32, lambda blocks: _fields(blocks[..., 4:], 4, 16), _half(0), minima=_half(2)),
    "Q5_0": _Kind(_INT8, 32, _q5_codes(6, 2, 16), _half(0)),
    "Q5_1": _Kind(_INT8, 32, _q5_codes(8, 4, 0), _half(0), minima=_half(2)),
    "Q8_0": _Kind(_INT8, 32, lambda blocks: blocks[..., 2:], _half(0)),
    "Q2_K": _Kind(
        *(_UINT4, 16, lambda blocks: _fields(blocks[..., 16:80], 2, 32)),
        *(_codes(lambda blocks: blocks[..., :16] & 15), _unit(80)),
        *(_codes(lambda blocks: blocks[..., :16] >> 4), _unit(82, -1)),
    ),
    "Q3_K": _Kind(_INT4, 16, _q3_codes, _codes(_q3_scales), _unit(108)),
    "Q4_K": _Kind(
        *(_UINT4, 32, lambda blocks: _fields(blocks[..., 16:], 4, 32)),
        *(_K_SCALES, _K_UNITS, _K_MINIMA, _K_MINIMUM_UNITS),
    ),
    "Q5_K": _Kind(_INT8, 32, _q5k_codes, _K_SCALES, _K_UNITS, _K_MINIMA, _K_MINIMUM_UNITS),
    "Q6_K": _Kind(_INT8, 16, _q6_codes, _codes(lambda blocks: blocks[..., 192:208]), _unit(208)),
}
