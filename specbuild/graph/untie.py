"""Heads that share codes with the embedding get codes of their own, where a backend is slow with turned ones."""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from specbuild.graph import ops as graphs
from specbuild.weights.packed import lazy


def untie_heads(model: ir.Model) -> int:
    """Let products by quantized tables [N, K], turned, be by codes [K, N] of their own, in place. Returns how many.

    ONNX Runtime would make numbers of the whole table in every pass. The new codes are computed when they are read.
    """
    count = 0
    for product in [node for node in model.graph if node.op_type == "MatMul"]:
        turn = product.inputs[1].producer() if product.inputs[1] is not None else None
        dequantize = turn.inputs[0].producer() if turn is not None and turn.inputs[0] is not None else None
        if turn is None or turn.op_type != "Transpose" or dequantize is None:
            continue
        if dequantize.op_type == "DequantizeLinear" and len(turn.outputs[0].uses()) == 1:
            product.replace_input_with(1, _turned(model.graph, dequantize))
            count += 1
    RemoveUnusedNodesPass()(model)
    return count


def _turned(graph: ir.Graph, dequantize: ir.Node) -> ir.Value:
    """The dequantized [K, N] of a table [N, K]."""
    inputs = [_constant(graph, value) for value in dequantize.inputs if value is not None]
    node = ir.node("DequantizeLinear", inputs, dict(dequantize.attributes), name=f"{dequantize.name}.turned")
    node.attributes["axis"] = ir.AttrInt64("axis", 1 - dequantize.attributes.get_int("axis", 1) % 2)
    node.outputs[0].name, node.outputs[0].type = node.name, dequantize.outputs[0].type
    graph.insert_after(dequantize, node)
    return node.outputs[0]


def _constant(graph: ir.Graph, value: ir.Value) -> ir.Value:
    """Codes, scales or zero points, turned where they have two axes."""
    stored = value.const_value
    if stored is None or len(stored.shape) != 2:
        return value
    name = f"{value.name}.turned"
    return graphs.initializer(
        graph, name, lazy(stored.dtype, stored.shape.numpy()[::-1], lambda: stored.numpy().T, name)
    )
