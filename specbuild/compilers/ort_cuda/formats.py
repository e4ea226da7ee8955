"""Requirements of ONNX Runtime's kernels on CUDA: supported formats, and operators that can be captured."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from specbuild.graph.ops import initializer

CAPTURED = frozenset(
    {
        *("Abs", "Add", "And", "Attention", "Cast", "Clip", "Concat", "Cos", "DequantizeLinear", "Div", "Equal"),
        *("Expand", "Floor", "Gather", "GatherElements", "GatherND", "Gelu", "Gemm", "Greater", "LayerNormalization"),
        *("Less", "LessOrEqual", "Log", "MatMul", "Max", "Mod", "Mul", "Pow", "QuantizeLinear", "RMSNormalization"),
        *("Range", "Reciprocal", "ReduceMax", "ReduceMean", "ReduceSum", "Relu", "Reshape", "RotaryEmbedding"),
        *("ScatterElements", "Shape", "Sigmoid", "Sin", "Slice", "Split", "Sqrt", "Squeeze", "Sub", "Tanh"),
        *("TensorScatter", "Tile", "TopK", "Transpose", "Unsqueeze"),
    }
)
"""Operators that were captured on a GPU (ONNX Runtime 1.31.1, an H200), and replayed to the same tokens.

Others may end the process: where CUDA refuses a call in a capture, an exception leaves a destructor of ONNX Runtime.
That happened in every graph with Softmax. All of these also have products that ONNX Runtime computes with tables of
addresses (experts that share their input, query heads that share their keys), which may be why.
"""
_EIGHT_BITS = (ir.DataType.INT8, ir.DataType.UINT8, ir.DataType.FLOAT8E4M3FN)


def can_be_captured(model: ir.Model) -> bool:
    """Whether all operators are of ``CAPTURED``, and all products are by matrices of weights."""
    products = [node for node in model.graph if node.op_type == "MatMul"]
    are_captured = all(node.domain == "" and node.op_type in CAPTURED for node in model.graph)
    return are_captured and all(_is_matrix(node.inputs[1]) for node in products)


def _is_matrix(value: ir.Value | None) -> bool:
    """Whether a value is constant weights [in, out], perhaps quantized or transposed."""
    while value is not None and value.const_value is None:
        node = value.producer()
        if node is None or node.op_type not in ("Cast", "DequantizeLinear", "Transpose"):
            return False
        value = node.inputs[0]
    return value is not None and value.shape is not None and len(value.shape) == 2


def has_float4(model: ir.Model) -> bool:
    """Whether weights are in float4, which no kernel supports."""
    weights = (value.const_value for value in model.graph.initializers.values())
    return any(weight is not None and weight.dtype == ir.DataType.FLOAT4E2M1 for weight in weights)


def split_block_scales(model: ir.Model) -> None:
    """Dequantize 8-bit experts with block scales in two steps: convert to numbers, then multiply by scales. In place.

    DequantizeLinear on CUDA supports blocks only of 4-bit codes; ONNX Runtime has a product for 8-bit matrices, but
    none for [E, in, out]. DequantizeLinear with the scale 1 is a cast that is not folded when the graph is loaded.
    """
    for node in [node for node in model.graph if node.op_type == "DequantizeLinear"]:
        codes, scales, *zero_points = node.inputs
        if "block_size" not in node.attributes or codes is None or scales is None or codes.dtype not in _EIGHT_BITS:
            continue
        if codes.shape is None or len(codes.shape) < 3 or scales.dtype is None or zero_points:
            continue
        axis, size = (node.attributes[name].as_int() for name in ("axis", "block_size"))
        shape = codes.shape.numpy()
        blocks = (*shape[:axis], shape[axis] // size, size, *shape[axis + 1 :])
        unit = _constant(model, np.array(1, scales.dtype.numpy()))
        numbers = ir.node("DequantizeLinear", [codes, unit])
        in_blocks = ir.node("Reshape", [numbers.outputs[0], _constant(model, np.array(blocks, np.int64))])
        factors = ir.node("Unsqueeze", [scales, _constant(model, np.array([axis + 1], np.int64))])
        weights = ir.node("Mul", [in_blocks.outputs[0], factors.outputs[0]])
        whole = ir.node("Reshape", [weights.outputs[0], _constant(model, np.array(shape, np.int64))])
        old, new = node.outputs[0], whole.outputs[0]
        new.name, new.type = old.name, old.type
        nodes = [numbers, in_blocks, factors, weights, whole]
        ir.convenience.replace_nodes_and_values(model.graph, node, [node], nodes, [old], [new])


def _constant(model: ir.Model, value: npt.NDArray[Any]) -> ir.Value:
    name = f"block_scales.{value.dtype}.{'.'.join(map(str, value.flat))}"
    return initializer(model.graph, name, ir.tensor(value))
