"""bitsandbytes: four-bit codes that index a table, and LLM.int8.

A table is no scale, so four-bit weights become int8: a value is off by at most half a step, 1/254 of its block's
largest.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from specbuild.quantized_formats.formats import Form
from specbuild.quantized_formats.unpack import words as unpack
from specbuild.quantized_formats.unpack.scales import scales
from specbuild.quantized_formats.unpack.stored import (
    FLOATS,
    INT8,
    UINT8,
    Array,
    CodeTensor,
    Module,
    NumpyTensor,
    Ranges,
    unpacked_rows,
)
from specbuild.weights.packed import Packed, lazy

Floats = npt.NDArray[np.float32]

_BYTES = (UINT8, INT8)
_FLOAT32 = (np.dtype(np.float32),)
_BLOCK = 64
"""Input channels that share a scale where the blocks of the file do not lie along them."""
STATES = tuple(f"weight.quant_state.bitsandbytes__{table}" for table in ("nf4", "fp4"))
TABLE_SUFFIXES = ("weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map", *STATES)


@dataclass(frozen=True)
class _State:
    """The JSON beside a weight: bitsandbytes/functional.py, QuantState.as_dict."""

    outputs: int
    inputs: int
    block: int
    nested_block: int
    nested_offset: float


def bitsandbytes_4bit(module: Module, form: Form) -> Packed:
    """nf4 and fp4: ``weight`` holds N * K / 2 bytes of the flattened weight [N, K], the first code in the high half.

    A value is ``quant_map`` [16] of its code times ``absmax`` of its block of the flattened weight. ``absmax`` may be
    quantized itself ("double quantization"). bitsandbytes 0.50: functional.py. Where blocks cross output channels, the
    values are rounded anew in blocks of 64 input channels.
    """
    weight = module.need("weight", dtypes=_BYTES + FLOATS)  # Any type that holds bytes: bnb_4bit_quant_storage.
    state = _read_state(module)
    size = state.outputs * state.inputs
    if math.prod(weight.shape) * weight.dtype.itemsize != -(-size // 2):
        raise module.error(f"{weight.name} of shape {list(weight.shape)}, expected {-(-size // 2)} bytes")
    values = _Values(module, weight, state)
    aligned = state.inputs % state.block == 0
    block = state.block if aligned else _BLOCK
    shape = state.inputs, state.outputs
    return Packed(
        codes=CodeTensor(ir.DataType.INT8, shape, values.codes if aligned else values.rounded_codes),
        scales=lazy(
            ir.DataType.FLOAT, (-(-shape[0] // block), shape[1]), values.scales if aligned else values.rounded_scales
        ),
        block=block,
    )


def bitsandbytes_8bit(module: Module, form: Form) -> Packed:
    """LLM.int8: ``weight`` int8 [N, K] and ``SCB`` float32 [N], the largest value of each output channel.

    bitsandbytes 0.50: _ops.py, int8_vectorwise_dequant; ``weight_format`` 0 is the only layout left ("row").
    """
    weight = module.matrix("weight", dtypes=(INT8,))
    layout = module.find("weight_format")
    if layout is not None and (math.prod(layout.shape) != 1 or int(layout.read().reshape(-1)[0]) != 0):
        raise module.error(f"{layout.name} is not 0 (rows), the layout that bitsandbytes still reads")
    shape = weight.shape[1], weight.shape[0]
    amax = scales(module, module.need("SCB", dtypes=_FLOAT32), shape, form.block)
    return Packed(
        codes=CodeTensor(ir.DataType.INT8, shape, unpacked_rows(module, weight)),
        scales=lazy(ir.DataType.FLOAT, shape[1:], lambda: amax.numpy() / np.float32(127)),
    )


@dataclass(frozen=True)
class _Values:
    """What the tensors of a four-bit weight hold."""

    module: Module
    weight: NumpyTensor
    state: _State

    def codes(self, ranges: Ranges) -> Iterator[Array]:
        """int8 codes of blocks that lie along the input channels."""
        pairs = self._bytes().reshape(self.state.outputs, -1)
        table = np.rint(self._table() * np.float32(127)).astype(np.int8)
        for start, stop in ranges:
            part = pairs[:, start // 2 : stop // 2]
            yield table[unpack.by_output(part >> 4 | part << 4, 4)]

    def scales(self) -> Floats:
        """[K / block, N] float32, of the same blocks."""
        return (self._absmax() / np.float32(127)).reshape(self.state.outputs, -1).T

    def rounded_codes(self, ranges: Ranges) -> Iterator[Array]:
        """int8 codes, rounded anew."""
        for start, stop in ranges:
            values, steps = self._rounded(start, stop)
            yield np.rint(values / np.repeat(steps, _BLOCK, axis=0)[: stop - start]).astype(np.int8)

    def rounded_scales(self) -> Floats:
        """[K / 64, N] float32, of these codes."""
        ends = range(0, self.state.inputs, _BLOCK)
        return np.concatenate([self._rounded(start, min(start + _BLOCK, self.state.inputs))[1] for start in ends])

    def _rounded(self, start: int, stop: int) -> tuple[Floats, Floats]:
        """Values [stop - start, N], and the steps in which blocks of 64 input channels are rounded."""
        flat = np.arange(start, stop)[:, None] + np.arange(self.state.outputs) * self.state.inputs
        pairs = self._bytes()[flat // 2]
        values = self._table()[np.where(flat % 2, pairs & 15, pairs >> 4)] * self._absmax()[flat // self.state.block]
        amax: Floats = np.maximum.reduceat(np.abs(values), np.arange(0, stop - start, _BLOCK), axis=0)
        amax[amax == 0] = 1
        return values, (amax / np.float32(127)).astype(np.float32)

    def _bytes(self) -> npt.NDArray[np.uint8]:
        return unpack.as_bytes(self.weight.read().reshape(-1))

    def _table(self) -> Floats:
        table = self.module.need("weight.quant_map", dtypes=_FLOAT32)
        values: Floats = self.module.finite(self.module.shaped(table, (16,)))
        if np.abs(values).max() > 1:
            raise self.module.error(f"{table.name} has values beyond -1 and 1")
        return values

    def _absmax(self) -> Floats:
        """The largest value of each block of the flattened weight."""
        state, module = self.state, self.module
        blocks = -(-state.outputs * state.inputs // state.block)
        amax = module.need("weight.absmax", dtypes=_FLOAT32 + _BYTES[:1])
        module.shaped(amax, (blocks,))
        if amax.dtype == np.float32:
            return module.finite(amax)
        nested = module.need("weight.nested_absmax", dtypes=_FLOAT32)
        module.shaped(nested, (-(-blocks // state.nested_block),))
        table = module.shaped(module.need("weight.nested_quant_map", dtypes=_FLOAT32), (256,))
        values = module.finite(table)[amax.read()]
        result: Floats = values * np.repeat(module.finite(nested), state.nested_block)[:blocks]
        return result + np.float32(state.nested_offset)


def _read_state(module: Module) -> _State:
    """The JSON beside a weight. Raises CheckpointError."""
    tensor = module.need(*STATES, dtypes=_BYTES)
    try:
        state: dict[str, Any] = json.loads(tensor.read().tobytes())
        outputs, inputs = state["shape"]
        described = _State(outputs, inputs, state["blocksize"], state.get("nested_blocksize", 256), 0.0)
        offset = float(state.get("nested_offset", 0))
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise module.error(f"{tensor.name} is no description of a weight with two dimensions") from error
    sizes = (described.outputs, described.inputs, described.block, described.nested_block)
    if not all(type(size) is int and 0 < size < 2**31 for size in sizes) or not math.isfinite(offset):
        raise module.error(f"{tensor.name} has sizes that no weight has: {sizes}, offset {offset:g}")
    return _State(*sizes, offset)
