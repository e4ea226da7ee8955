"""Mixtures of experts of which only the used experts are read.

The exported graph multiplies every token by every expert and weighs the results, mostly by zero: nothing in it depends
on the data, so every compiler takes it. ONNX Runtime can skip nodes while it runs. Here each expert becomes a branch
(``If``) that is taken where a token of the pass has chosen the expert. A branch computes all tokens of the pass, so a
row's bits do not depend on what other tokens have chosen.
"""

from __future__ import annotations

import onnx_ir as ir

from specbuild.graph import ops as graphs
from specbuild.graph.moe import Mixture, Tape, replace, rewrite, stored_shape
from specbuild.graph.ops import input_of


def skip_unused_experts(model: ir.Model) -> int:
    """Let ``model``, in float32 and with its weights in a file, read only the experts that a pass uses, in place.

    Returns how many mixtures there are.
    """
    return rewrite(model, _skip_unused)


def _skip_unused(graph: ir.Graph, mixture: Mixture) -> None:
    """Replace one mixture by a branch for each expert, which adds what the expert gives to the experts' before it."""
    made = Tape(f"{mixture.sum.name}.experts")
    parts = {node: input_of(node, 1) for node in mixture.nodes if graphs.EXPERTS in node.metadata_props}
    stored = {node for node, value in parts.items() if _is_stored(value)}
    number = stored_shape(parts[mixture.nodes[0]])[0]
    split = {node: made.split(value, number) for node, value in parts.items() if node not in stored}
    is_used = made.split(_is_used(made, mixture), number)
    total = made.op("ConstantOfShape", made.op("Shape", mixture.states))
    for expert in range(number):
        used, unused = Tape(f"{made.name}.{expert}.used"), Tape(f"{made.name}.{expert}.unused")
        results: dict[ir.Value | None, ir.Value] = {}
        for node in mixture.nodes:
            inputs = [results.get(value, value) for value in node.inputs]
            if node in stored:
                inputs[0] = _beside_product(inputs[0], used)
                inputs[1] = _part(parts[node], expert, made, used)
            elif node in split:
                inputs[1] = split[node][expert]
            results.update(zip(node.outputs, used.copy(node, inputs), strict=True))
        used.op("Add", total, results[mixture.sum.inputs[0]])
        unused.op("Identity", total)
        total = made.op("If", is_used[expert], then_branch=used.graph(), else_branch=unused.graph())
    total = made.op("Squeeze", total, made.numbers([0]))
    replace(graph, mixture, made, total)


def _beside_product(x: ir.Value | None, branch: Tape) -> ir.Value | None:
    """The input of a product; where it is in 8 bits, its numbers are made of codes in the branch, to be fused."""
    node = x.producer() if x is not None else None
    return branch.copy(node, node.inputs)[0] if node is not None and node.op_type == "DequantizeLinear" else x


def _is_used(made: Tape, mixture: Mixture) -> ir.Value:
    """bool [E, 1, 1]: whether a token has chosen the expert."""
    used = made.op("Cast", mixture.routing, to=int(ir.DataType.BOOL))
    return made.op("ReduceMax", used, made.numbers([1, 2]), keepdims=1)


_READS = ("Cast", "DequantizeLinear")
"""Operators between a stored weight and its product."""


def _is_stored(value: ir.Value) -> bool:
    """Whether ``value`` is a constant, or its numbers, of which one expert's part can be taken."""
    node = value.producer()
    if node is not None:
        return node.op_type in _READS and all(other is not None and _is_stored(other) for other in node.inputs)
    return value.const_value is not None and stored_shape(value) != ()


def _part(value: ir.Value, expert: int, outside: Tape, branch: Tape, row: bool = False) -> ir.Value:
    """One expert's part of a stored weight. Codes, and what makes numbers of them, are in the branch, to be fused.

    row: of [E, 1, N] take [N], not [1, N].
    """
    node = value.producer()
    if node is None:
        return outside.part(value, expert, row)
    if node.op_type == "Cast":
        return outside.copy(node, [_part(input_of(node, 0), expert, outside, outside, row)])[0]
    codes, *scales = (input_of(node, index) for index in range(len(node.inputs)))
    groups = stored_shape(scales[0])[1:-1]  # Of scales [E] there are none; of [E, G, N] it is (G,).
    inputs = [_part(codes, expert, branch, branch, row)]
    inputs += [_part(value, expert, branch, branch, row or groups == (1,)) for value in scales]
    output = branch.copy(node, inputs)[0]
    attributes = branch.nodes[-1].attributes
    if not groups:
        del attributes["axis"]
    elif groups == (1,):  # A scale for each channel: the axis is the channels'.
        del attributes["block_size"]
    else:
        attributes["axis"] = ir.AttrInt64("axis", 0)
    return output
