"""Weights in the formats that our products take.

Our products round inputs in groups themselves, which keeps more than a checkpoint's own rounding of inputs.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from specbuild.compilers.cpu.fusions import fuse_into_products
from specbuild.compilers.cpu.products import FLOAT_CODES, use_own_products
from specbuild.compilers.cpu.wanted import take_wanted_tokens_first
from specbuild.graph import ops as graphs
from specbuild.weights.packed import Floats, as_float32, lazy

BLOCK = 32
"""Input channels that share a scale in 8-bit weights that are made of float8."""


def prepare(model: ir.Model) -> list[str]:
    """Let our operators compute the products of ``model``, which computes in float32, in place. Returns notes.

    Weights in other codes are tensors that are computed when they are read, and not in the files of ``model``.
    """
    recoded: Counter[str] = Counter()
    read = functools.lru_cache(maxsize=1)(recode)  # Codes and scales are written one after the other.
    graphs.drop_activation_rounding(model)
    for node in _weights(model):
        if (weight := node.inputs[0]) is not None and weight.dtype in FLOAT_CODES:
            recoded[weight.dtype.name.lower()] += 1
            _replace_codes(node, read)
    take_wanted_tokens_first(model)
    num_products = use_own_products(model)
    RemoveUnusedNodesPass()(model)
    notes = [f"{count} weights in {form}: 8-bit blocks on the CPU" for form, count in recoded.items()]
    if num_products:
        fused = fuse_into_products(model)
        notes.append(f"{num_products} products by specrun's own CPU operators, with {fused} other nodes in them")
    return notes


def _weights(model: ir.Model) -> Iterator[ir.Node]:
    """Where weights are dequantized; not the scales of others."""
    for node in graphs.all_nodes(model):
        weight = node.inputs[0] if node.op_type == "DequantizeLinear" else None
        readers = {use.node.op_type for value in node.outputs for use in value.uses()}
        if weight is not None and weight.is_initializer() and "DequantizeLinear" not in readers:
            yield node


class Weight(NamedTuple):
    """A weight in float8 or float4; see ``Packed``."""

    codes: ir.TensorProtocol
    scales: tuple[ir.TensorProtocol, ...]
    """Factors of the scales."""
    block: int
    """Input channels that share a scale; 0: all of a column."""

    @property
    def is_float4(self) -> bool:
        """Whether its codes are float4; else they are float8."""
        return self.codes.dtype == ir.DataType.FLOAT4E2M1


_Recoded = tuple[npt.NDArray[np.int8], Floats]
"""Codes [K, N] and scales [K / block, N]."""


def _replace_codes(node: ir.Node, read: Callable[[Weight], _Recoded]) -> None:
    """Let ``node`` dequantize int8 blocks instead of float8 or float4. They are computed when they are written."""
    codes, scales = node.inputs[0], node.inputs[1]
    assert codes is not None and scales is not None and codes.const_value is not None
    block_size = node.attributes.get_int("block_size", 0)
    weight = Weight(codes.const_value, tuple(graphs.constant_factors(scales)), block_size)
    block = block_size if weight.is_float4 else BLOCK
    rows, columns = (int(size) for size in weight.codes.shape)  # type: ignore[arg-type]
    parts = (("int8", ir.DataType.INT8, rows), ("scales", ir.DataType.FLOAT, -(-rows // block)))
    for index, (role, dtype, length) in enumerate(parts):
        name = f"{codes.name}.{role}"
        part = lazy(dtype, [length, columns], functools.partial(lambda index: read(weight)[index], index), name)
        node.replace_input_with(index, graphs.initializer(graphs.graph_of(node), name, part))
    node.attributes["axis"] = ir.AttrInt64("axis", 0)
    node.attributes["block_size"] = ir.AttrInt64("block_size", block)


def recode(weight: Weight) -> _Recoded:
    """In int8 blocks. All values of float4 are codes of int8, so that is exact; float8 is rounded once more."""
    values = as_float32(weight.codes)
    scales = np.asarray(math.prod(as_float32(factor) for factor in weight.scales), np.float32)
    if weight.is_float4:  # 0, 0.5, 1, 1.5, 2, 3, 4, 6: twice as much is a whole number.
        return (values * 2).astype(np.int8), scales / np.float32(2)
    spread = np.repeat(scales, weight.block, axis=0)[: len(values)] if weight.block else scales
    values *= spread
    steps = np.maximum.reduceat(np.abs(values), np.arange(0, len(values), BLOCK), axis=0) / np.float32(127)
    steps[steps == 0] = 1
    codes = np.rint(values / np.repeat(steps, BLOCK, axis=0)[: len(values)])
    return codes.astype(np.int8), steps.astype(np.float32)
