"""What stands before and behind our products becomes part of them: see ``specrun.cpu_operators`` and ``activations.h``.

Before: a normalization, or a gate's activation times what it gates. Behind: the sum with the residual stream. Each of
them is an operator that ONNX Runtime starts and that passes over memory, a tenth of a step in 4 bits.
"""

from __future__ import annotations

from typing import NamedTuple

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from specrun.cpu_operators import DOMAIN

NORMALIZED, SILU_GATED, GELU_GATED = 1, 2, 3
"""``Prologue`` in ``activations.h``."""
_PLACES = {"QuantizedMatMul": (4, 5), "FloatMatMul": (2, 3)}
"""Positions of two inputs of each operator: ``other`` of its prologue, and the residual."""


class Prologue(NamedTuple):
    """The prologue of a product: how its activations are computed from ``x``."""

    kind: int
    x: ir.Value
    other: ir.Value
    epsilon: float = 0.0


def fuse_into_products(model: ir.Model) -> int:
    """Let our products make their activations and add the residual, where the graph allows it, in place.

    Returns how many nodes that saves.
    """
    before = len(model.graph)
    for node in [node for node in model.graph if node.op_type in _PLACES and node.domain == DOMAIN]:
        _make_activations(node)
        _add_residual(model.graph, node)
    RemoveUnusedNodesPass()(model)
    return before - len(model.graph)


def prologue_of(node: ir.Node) -> Prologue | None:
    """How one of our products computes its activations; None where they are given, or it is another operator."""
    kind = node.attributes.get_int("made", 0) if node.op_type in _PLACES else 0
    if not kind:
        return None
    x, other = node.inputs[0], node.inputs[_PLACES[node.op_type][0]]
    assert x is not None and other is not None
    return Prologue(kind, x, other, node.attributes.get_float("epsilon", 0.0))


def normalizes(node: ir.Node) -> bool:
    """Whether a node is one of our products, and normalizes its input."""
    prologue = prologue_of(node)
    return prologue is not None and prologue.kind == NORMALIZED


def residual_of(node: ir.Node) -> ir.Value | None:
    """What one of our products adds; None where a node adds nothing, or is another operator."""
    _, index = _PLACES.get(node.op_type, (0, len(node.inputs)))
    return node.inputs[index] if index < len(node.inputs) else None


def _make_activations(node: ir.Node) -> None:
    x = node.inputs[0]
    if x is None or (prologue := _prologue(x)) is None:
        return
    index, _ = _PLACES[node.op_type]
    node.resize_inputs(max(len(node.inputs), index + 1))
    node.replace_input_with(0, prologue.x)
    node.replace_input_with(index, prologue.other)
    node.attributes["made"] = ir.AttrInt64("made", prologue.kind)
    node.attributes["epsilon"] = ir.AttrFloat32("epsilon", prologue.epsilon)


def _prologue(x: ir.Value) -> Prologue | None:
    """None where they are given: others read them too, or they are made in another way."""
    node = _only(x)
    if node is None:
        return None
    if node.op_type == "RMSNormalization":
        inner, scale = node.inputs
        axis = node.attributes.get_int("axis", -1)
        epsilon = node.attributes.get_float("epsilon", 1e-5)
        if axis != -1 or inner is None or scale is None or scale_length(scale) is None:
            return None
        return Prologue(NORMALIZED, inner, scale, epsilon)
    if node.op_type != "Mul":
        return None
    for activated, other in (node.inputs, reversed(node.inputs)):
        if activated is not None and other is not None and (gate := _gate(activated)) is not None:
            return Prologue(*gate, other) if not other.is_initializer() and other is not activated else None
    return None


def _gate(activated: ir.Value) -> tuple[int, ir.Value] | None:
    """The kind of an activation, and its input."""
    node = _only(activated)
    if node is None or (x := node.inputs[0]) is None:
        return None
    if node.op_type == "Gelu":
        tanh = node.attributes.get_string("approximate") == "tanh"
        return (GELU_GATED, x) if tanh else None
    if node.op_type == "Swish":
        alpha = node.attributes.get_float("alpha", 1.0)
        return (SILU_GATED, x) if alpha == 1 else None
    if node.op_type != "Mul":
        return None
    for x, factor in (node.inputs, reversed(node.inputs)):
        sigmoid = _only(factor) if factor is not None else None
        if x is not None and sigmoid is not None and sigmoid.op_type == "Sigmoid" and sigmoid.inputs[0] is x:
            return SILU_GATED, x
    return None


def _add_residual(graph: ir.Graph, node: ir.Node) -> None:
    """Replace the product and the sum behind it by one node, which stands where the sum was."""
    y = node.outputs[0]
    found = residual_sum(y, node.attributes["N"].as_ints()[0]) if len(node.outputs) == 1 else None
    if found is None:
        return
    add, residual = found
    _, index = _PLACES[node.op_type]
    inputs = [*node.inputs, *[None] * (index + 1 - len(node.inputs))]
    inputs[index] = residual
    replacement = ir.node(node.op_type, inputs, node.attributes, domain=DOMAIN, num_outputs=1, name=node.name)
    replacement.outputs[0].name, replacement.outputs[0].dtype = y.name, ir.DataType.FLOAT
    ir.convenience.replace_nodes_and_values(
        graph, add, [add, node], [replacement], [add.outputs[0]], replacement.outputs
    )


def residual_sum(value: ir.Value, width: int | None) -> tuple[ir.Node, ir.Value] | None:
    """The one reader of a value, if it is an Add of the residual stream of this width, and the stream; else None."""
    uses = list(value.uses())
    if value.is_graph_output() or len(uses) != 1 or uses[0].node.op_type != "Add":
        return None
    residual = uses[0].node.inputs[1 - uses[0].idx]
    return (uses[0].node, residual) if residual is not None and _is_stream(residual, width) else None


def _is_stream(value: ir.Value, width: int | None) -> bool:
    """Whether a value is the residual stream of this width: it is normalized, and so has all axes of a product."""
    readers = [use.node for use in value.uses()]
    norms = [node for node in readers if node.op_type == "RMSNormalization"]
    scales = [node.inputs[1] for node in norms]
    norm_scales = [
        node.inputs[_PLACES[node.op_type][0]] for node in readers if normalizes(node) and node.inputs[0] is value
    ]
    return width in [scale_length(scale) for scale in [*scales, *norm_scales] if scale is not None]


def scale_length(scale: ir.Value) -> int | None:
    """The length of a constant vector, which may be cast; None where it is none."""
    node = scale.producer()
    vector = node.inputs[0] if node is not None and node.op_type == "Cast" else scale
    if vector is None or not vector.is_initializer() or vector.shape is None or len(vector.shape) != 1:
        return None
    return int(vector.shape[0])  # type: ignore[arg-type]


def _only(value: ir.Value) -> ir.Node | None:
    """What computes a value that has one reader."""
    return None if value.is_graph_output() or len(value.uses()) != 1 else value.producer()
