"""Products with quantized weights by specrun's own operator: see ``specrun.cpu_operators``.

It takes the place of DequantizeLinear and MatMul, and of what rounds their input token by token. It rounds inputs to
8 bits itself: with a scale for each token, or for each of its blocks where weights have blocks or inputs are not
rounded in the graph. ONNX Runtime's operators do the same.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from specbuild.graph import ops as graphs
from specbuild.weights.cpu_layout import by_strips, line_inputs, pack_codes, packed_shape
from specbuild.weights.packed import Floats, as_float32
from specrun.cpu_operators import DOMAIN

_BITS = {ir.DataType.INT4: 4, ir.DataType.UINT4: 4, ir.DataType.INT8: 8, ir.DataType.UINT8: 8}
_MIDDLE = {ir.DataType.INT4: 0, ir.DataType.UINT4: 8, ir.DataType.INT8: 0, ir.DataType.UINT8: 128}
"""The zero point of codes that the operator takes as they are."""
_INPUT_BLOCK = 128
"""Inputs that are rounded with one scale where neither the weight has blocks nor the graph rounds them."""
_LONGEST_BLOCK = 1 << 16
"""Sums of so many products of 8-bit numbers fit into 32 bits."""


def use_own_products(model: ir.Model) -> int:
    """Let the products of ``model``, in float32, be computed by our operator where it takes them, in place.

    Returns how many there are. The weights in its layout are computed when they are read.
    """
    count = 0
    for node in list(model.graph):  # Not those in branches: ONNX Runtime has experts' codes there.
        weight = _weight(node) if node.op_type == "DequantizeLinear" else None
        if weight is None:
            continue
        for use in list(node.outputs[0].uses()):
            count += _replace(model.graph, use.node, weight)
    if count:
        model.opset_imports[DOMAIN] = 1
    return count


@dataclass(frozen=True)
class _Weight:
    """What a DequantizeLinear makes of a weight [K, N]."""

    name: str
    codes: ir.TensorProtocol
    scales: tuple[ir.TensorProtocol, ...]
    """Factors of the scales."""
    zeros: ir.TensorProtocol | None
    block: int
    """0: one scale a column."""

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = (int(size) for size in self.codes.shape)  # type: ignore[arg-type]
        return rows, columns


def _weight(node: ir.Node) -> _Weight | None:
    """None where the operator does not take it, or its codes are read by others too, which would keep them twice."""
    codes, scales, zeros = (*node.inputs, None)[:3]
    if codes is None or scales is None or not codes.is_initializer() or codes.dtype not in _BITS:
        return None
    if codes.shape is None or len(codes.shape) != 2 or codes.const_value is None or len(codes.uses()) != 1:
        return None
    if any(use.node.op_type != "MatMul" or use.idx != 1 for use in node.outputs[0].uses()):
        return None
    block = node.attributes["block_size"].as_int() if "block_size" in node.attributes else 0
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 1
    if zeros is not None and zeros.const_value is None:
        return None
    zero_points = zeros.const_value if zeros is not None else None
    weight = _Weight(str(codes.name), codes.const_value, tuple(graphs.constant_factors(scales)), zero_points, block)
    fits = axis % 2 == (0 if block else 1) and (block or weight.shape[0]) <= _LONGEST_BLOCK
    return weight if fits and block % line_inputs(_BITS[codes.dtype]) == 0 else None


def _replace(graph: ir.Graph, product: ir.Node, weight: _Weight) -> bool:
    """Replace ``product`` with what rounds its input; False where that is of a kind that the operator does not have."""
    x, last = product.inputs[0], product
    if x is None:
        return False
    by_token = False
    if (rounded := x.producer()) is not None and rounded.op_type == "DequantizeLinear":
        found = _rounded_by_token(rounded, product)
        if found is None or weight.block:
            return False
        (x, last), by_token = found, True
    own = _node(graph, x, weight, by_token)
    old = list(dict.fromkeys((last, product)))
    ir.convenience.replace_nodes_and_values(graph, last, old, [own], [last.outputs[0]], [own.outputs[0]])
    return True


def _rounded_by_token(dequantize: ir.Node, product: ir.Node) -> tuple[ir.Value, ir.Node] | None:
    """What was rounded, and the node that multiplies the product by its tokens' largest values.

    None where inputs are rounded in another way than ``specbuild.quantization.insert_qdq`` has it, as by one scale.
    """
    quantize = dequantize.inputs[0].producer() if dequantize.inputs[0] is not None else None
    divided = quantize.inputs[0].producer() if quantize is not None and quantize.inputs[0] is not None else None
    if quantize is None or quantize.op_type != "QuantizeLinear" or divided is None or divided.op_type != "Div":
        return None
    x, amax = divided.inputs
    uses = list(product.outputs[0].uses())
    if x is None or amax is None or len(uses) != 1 or uses[0].node.op_type != "Mul":
        return None
    steps = [node.inputs[1].const_value for node in (quantize, dequantize) if node.inputs[1] is not None]
    is_usual = all(step is not None and math.isclose(float(step.numpy()), 1 / 127, rel_tol=1e-5) for step in steps)
    return (x, uses[0].node) if amax in uses[0].node.inputs and is_usual else None


def _node(graph: ir.Graph, x: ir.Value, weight: _Weight, by_token: bool) -> ir.Node:
    rows, columns = weight.shape
    bits = _BITS[weight.codes.dtype]
    block = weight.block or (-(-rows // line_inputs(bits)) * line_inputs(bits) if by_token else _INPUT_BLOCK)
    scale_blocks = -(-rows // weight.block) if weight.block else 1

    def lazy(role: str, dtype: ir.DataType, shape: Any, read: Callable[[], npt.NDArray[Any]]) -> ir.Value:
        name = f"{weight.name}.{role}"
        tensor = ir.LazyTensor(lambda: ir.tensor(read()), dtype, ir.Shape(shape), name=name)
        return graphs.initializer(graph, name, tensor)

    strips = packed_shape(rows, columns, bits)[0]
    inputs = [
        x,
        lazy("lines", ir.DataType.UINT8, packed_shape(rows, columns, bits), functools.partial(_codes, weight)),
        lazy("strips", ir.DataType.FLOAT, (strips, scale_blocks, 16), functools.partial(_scales, weight, scale_blocks)),
    ]
    if weight.zeros is not None or _MIDDLE[weight.codes.dtype]:
        zero_blocks = -(-rows // block)
        read = functools.partial(_zeros, weight, zero_blocks)
        inputs.append(lazy(f"zeros.{zero_blocks}", ir.DataType.INT8, (strips, zero_blocks, 16), read))
    sizes = {"bits": bits, "K": rows, "N": columns, "block_size": block}
    node = ir.node("QuantizedMatMul", inputs, sizes, domain=DOMAIN, name=f"{weight.name}.product")
    node.outputs[0].name, node.outputs[0].dtype = f"{node.name}.{x.name}", ir.DataType.FLOAT
    return node


def _codes(weight: _Weight) -> npt.NDArray[np.uint8]:
    return pack_codes(np.asarray(weight.codes.numpy()), _BITS[weight.codes.dtype])


def _scales(weight: _Weight, blocks: int) -> npt.NDArray[np.float32]:
    scales: Floats = np.asarray(math.prod(as_float32(factor) for factor in weight.scales), np.float32)
    return by_strips(np.broadcast_to(scales, (blocks, weight.shape[1])))


def _zeros(weight: _Weight, blocks: int) -> npt.NDArray[np.int8]:
    """Zero points less the operator's own."""
    zeros = np.zeros((), np.int16) if weight.zeros is None else np.asarray(weight.zeros.numpy()).astype(np.int16)
    own = (zeros - _MIDDLE[weight.codes.dtype]).astype(np.int8)
    return by_strips(np.broadcast_to(own, (blocks, weight.shape[1])))
