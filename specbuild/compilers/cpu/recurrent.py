"""Recurrent layers by specrun's own CPU operators: see ``graph.recurrent`` for what they compute.

The standard operators would read every token twice, and could not leave a state in the memory in which they found it.
"""

from __future__ import annotations

import onnx_ir as ir

from specbuild.graph.recurrent import CONVOLUTION, is_recurrent
from specrun.cpu_operators import DOMAIN, VERSION


def use_recurrent_operators(model: ir.Model) -> int:
    """Put our own operators in place of the functions, in a graph in float32. In place; returns how many."""
    nodes = [node for node in model.graph if is_recurrent(node)]
    for node in nodes:
        new_nodes = _convolution(node) if node.op_type == CONVOLUTION else [_attention(node)]
        ir.convenience.replace_nodes_and_values(
            model.graph, node, [node], new_nodes, node.outputs, new_nodes[-1].outputs
        )
    if nodes:
        model.functions.clear()
        model.opset_imports[DOMAIN] = VERSION
    return len(nodes)


def _attention(node: ir.Node) -> ir.Node:
    *factors, past_state, past_inputs, write, state, keep = node.inputs
    query, key, value, decay, *beta = factors
    inputs = [query, key, value, decay, past_state, past_inputs, write, state, keep, *(beta or [None])]
    scale = node.attributes["scale"]
    return ir.Node(DOMAIN, "RecurrentAttention", inputs, [scale], num_outputs=3)


def _convolution(node: ir.Node) -> list[ir.Node]:
    x, weight, *others = node.inputs
    axis = ir.node("Constant", [], {"value_ints": [1]})
    flat = ir.node("Squeeze", [weight, axis.outputs[0]])
    turned = ir.node("Transpose", [flat.outputs[0]], {"perm": [1, 0]})
    operator = ir.Node(DOMAIN, CONVOLUTION, [x, turned.outputs[0], *others], num_outputs=2)
    return [axis, flat, turned, operator]
