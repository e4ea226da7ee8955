"""Mixtures of experts by our own products, which multiply each token by the weights of the experts that it has chosen.

A checkpoint's graph computes every expert for every token [E, T, ..] and adds up what is chosen: a static form that
TensorRT takes. Here the k experts of a token stand side by side [T, k, ..], and an expert that no token of a pass has
chosen is not read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from specbuild.graph import ops as graphs
from specbuild.graph.ops import input_of
from specbuild.graph.weight_slices import StoredPart
from specrun.cpu_operators import DOMAIN, VERSION

OPERATOR = "ExpertMatMul"
"""A product of rows with dense or dequantized weights [K, N] of their own: x, the weight's number of each row [..], and
the weights. ``products`` makes FloatMatMul or QuantizedMatMul of it."""


@dataclass(frozen=True)
class _Mixture:
    """The nodes of one dense mixture of E experts."""

    nodes: Sequence[ir.Node]
    """Nodes that compute the experts' weighted results [E, T, H], in order; the last one weights them."""
    sum: ir.Node
    """Node that adds the results up: [T, H]."""


def use_chosen_experts(model: ir.Model) -> int:
    """Let mixtures of ``model``, in float32 and with its weights in a file, compute what is chosen, in place.

    Returns how many there are.
    """
    mixtures = list(_mixtures(model.graph))
    for mixture in mixtures:
        _replace(model.graph, mixture)
    if mixtures:
        model.opset_imports[DOMAIN] = VERSION
        RemoveUnusedNodesPass()(model)
    return len(mixtures)


def _mixtures(graph: ir.Graph) -> Iterator[_Mixture]:
    """Found by the marks of ``export.experts``."""
    per_expert: set[ir.Value | None] = set()
    for node in graph:
        mark = node.metadata_props.get(graphs.EXPERTS)
        if mark == graphs.EXPERTS_SUM:
            yield _Mixture(_nodes_of(input_of(node, 0), per_expert), node)
        elif mark is not None or not per_expert.isdisjoint(node.inputs):
            per_expert.update(node.outputs)


def _nodes_of(value: ir.Value, per_expert: set[ir.Value | None]) -> list[ir.Node]:
    """The nodes in ``per_expert`` that ``value`` is computed by, in order."""
    nodes: dict[ir.Node, None] = {}

    def visit(value: ir.Value | None) -> None:
        node = value.producer() if value is not None and value in per_expert else None
        if node is not None and node not in nodes:
            for other in node.inputs:
                visit(other)
            nodes[node] = None

    visit(value)
    return list(nodes)


def _replace(graph: ir.Graph, mixture: _Mixture) -> None:
    *nodes, weighting = mixture.nodes
    new_nodes: list[ir.Node] = []

    def add(node: ir.Node) -> Sequence[ir.Value]:
        node.name = f"{mixture.sum.name}.experts.{len(new_nodes)}"
        for number, value in enumerate(node.outputs):
            value.name, value.dtype = f"{node.name}.{number}", ir.DataType.FLOAT
        new_nodes.append(node)
        return node.outputs

    def new(operator: str, *inputs: ir.Value | None, axis: int | None = None) -> ir.Value:
        axes = [] if axis is None else [graphs.constant(graph, f"experts.axis.{axis}", [axis])]
        return add(ir.node(operator, [*inputs, *axes]))[0]

    experts, shares = _choices(input_of(weighting, 1))
    results: dict[ir.Value | None, ir.Value] = {}
    """[T, k, ..] for [E, T, ..]."""
    for node in nodes:
        inputs = [results.get(value, value) for value in node.inputs]
        if graphs.EXPERTS not in node.metadata_props:
            copy = ir.Node(
                node.domain, node.op_type, inputs, list(node.attributes.values()), num_outputs=len(node.outputs)
            )
            results.update(zip(node.outputs, add(copy), strict=True))
        elif node.op_type == "MatMul":
            weights = _weights(graph, input_of(node, 1), f"{mixture.sum.name}.{len(new_nodes)}")
            product = ir.node(OPERATOR, [inputs[0], experts, *weights], domain=DOMAIN)
            results[node.outputs[0]] = add(product)[0]
        elif node.op_type == "Mul":  # Of what experts read.
            x = inputs[0] if node.inputs[0] in results else new("Squeeze", inputs[0], axis=0)
            x = x if node.inputs[0] in results else new("Unsqueeze", x, axis=1)
            results[node.outputs[0]] = new("Mul", x, new("Unsqueeze", _choices(input_of(node, 1))[1], axis=2))
        else:  # A bias [E, 1, N].
            selected = new("Gather", new("Squeeze", inputs[1], axis=1), experts)
            results[node.outputs[0]] = new(node.op_type, inputs[0], selected)
    # As a product its numbers are added in one order, however many tokens there are.
    total = new("MatMul", new("Unsqueeze", shares, axis=1), results[weighting.inputs[0]])
    total = new("Squeeze", total, axis=1)
    old = [*mixture.nodes, mixture.sum]
    ir.convenience.replace_nodes_and_values(graph, mixture.sum, old, new_nodes, mixture.sum.outputs, [total])


def _choices(routing: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The experts of each token and their shares, both [T, k], of which ``export.experts`` makes [E, T, 1]."""
    node = routing.producer()
    while node is not None and node.op_type in ("Cast", "Unsqueeze", "Transpose"):
        node = input_of(node, 0).producer()
    if node is None or node.op_type != "ScatterElements":
        raise ValueError(f"{routing.name}: is not made of the experts that tokens have chosen")
    return input_of(node, 1), input_of(node, 2)


def _weights(graph: ir.Graph, stacked: ir.Value, name: str) -> list[ir.Value]:
    """Each expert's part of a stored weight [E, K, N], and what makes numbers of it."""
    experts, rows, _ = _stored_shape(stacked)
    weights, added = [], list[ir.Node]()
    for expert in range(experts):
        nodes: list[ir.Node] = []
        weights.append(StoredPart(expert, 0, rows).of(stacked, nodes))
        inputs = [weights[-1], *(value for node in nodes for value in node.inputs if value is not None)]
        for part in dict.fromkeys(value for value in inputs if value.const_value is not None and value.graph is None):
            part.name = f"{name}.{part.name}"  # Another layer may read the same one.
            graph.register_initializer(part)
        for number, node in enumerate(nodes):
            node.name = node.outputs[0].name = f"{name}.{expert}.{number}.numbers"
            node.outputs[0].dtype = ir.DataType.FLOAT
        added += nodes
    graph.insert_before(next(iter(graph)), added)
    return weights


def _stored_shape(value: ir.Value) -> tuple[int, ...]:
    """Of a stored weight [E, K, N]."""
    while (node := value.producer()) is not None:
        value = input_of(node, 0)
    if value.const_value is None:
        raise ValueError(f"{value.name}: is no stored weight")
    return tuple(int(size) for size in value.const_value.shape.numpy())
