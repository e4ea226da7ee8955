"""Mixtures of experts of which only the used experts are read.

The exported graph multiplies every token by every expert and weighs the results, mostly by zero: nothing in it depends
on the data, so every compiler takes it. ONNX Runtime can skip nodes while it runs. Here each expert becomes a branch
(``If``) that is taken where a token of the pass has chosen the expert. A branch computes all tokens of the pass, so a
row's bits do not depend on what other tokens have chosen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from specbuild.graph import ops as graphs
from specbuild.graph.ops import input_of
from specbuild.graph.weight_slices import StoredPart


@dataclass(frozen=True)
class Mixture:
    """The nodes of one dense mixture of E experts."""

    nodes: Sequence[ir.Node]
    """Nodes that compute the experts' weighted results [E, T, H], in order."""
    sum: ir.Node
    """Node that adds the results up: [T, H]."""

    @property
    def states(self) -> ir.Value:
        """What all experts read, [1, T, H]."""
        return input_of(self.nodes[0], 0)

    @property
    def routing(self) -> ir.Value:
        """What results are multiplied by, [E, T, 1]: 0 where the token has not chosen the expert."""
        return input_of(self.nodes[-1], 1)


def mixtures(graph: ir.Graph) -> Iterator[Mixture]:
    """Found by the marks of ``export.experts``."""
    per_expert: set[ir.Value | None] = set()
    for node in graph:
        mark = node.metadata_props.get(graphs.EXPERTS)
        if mark == graphs.EXPERTS_SUM:
            yield Mixture(_made_of(input_of(node, 0), per_expert), node)
        elif mark is not None or not per_expert.isdisjoint(node.inputs):
            per_expert.update(node.outputs)


def _made_of(value: ir.Value, per_expert: set[ir.Value | None]) -> list[ir.Node]:
    """The nodes in ``per_expert`` that ``value`` is computed by, in order."""
    inside: dict[ir.Node, None] = {}

    def visit(value: ir.Value | None) -> None:
        node = value.producer() if value is not None and value in per_expert else None
        if node is not None and node not in inside:
            for other in node.inputs:
                visit(other)
            inside[node] = None

    visit(value)
    return list(inside)


class Tape:
    """Makes nodes in order, with names that nothing else in the model has."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.nodes: list[ir.Node] = []
        self.weights: list[ir.Value] = []
        """Initializers that belong to the nodes."""

    def numbers(self, values: Sequence[float], dtype: ir.DataType = ir.DataType.INT64) -> ir.Value:
        """A constant [N]."""
        return self.op("Constant", value=ir.tensor(values, dtype))

    def op(self, op_type: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        """One node with one output."""
        return self.add(ir.node(op_type, inputs, attributes))[0]

    def split(self, value: ir.Value, number: int) -> Sequence[ir.Value]:
        """The parts of ``value`` along its first axis."""
        return self.add(ir.node("Split", [value], {"axis": 0, "num_outputs": number}, num_outputs=number))

    def copy(self, node: ir.Node, inputs: Sequence[ir.Value | None]) -> Sequence[ir.Value]:
        """``node`` with other inputs."""
        attributes = list(node.attributes.values())
        return self.add(ir.Node(node.domain, node.op_type, inputs, attributes, num_outputs=len(node.outputs)))

    def graph(self) -> ir.Graph:
        """The nodes as a branch, which gives the last one's output."""
        return ir.Graph([], self.nodes[-1].outputs, nodes=self.nodes, initializers=self.weights, name=self.name)

    def add(self, node: ir.Node) -> Sequence[ir.Value]:
        """``node``, named; returns its outputs."""
        node.name = f"{self.name}.{len(self.nodes)}"
        for number, value in enumerate(node.outputs):
            value.name = f"{node.name}.{number}"
        self.nodes.append(node)
        return node.outputs


def stored_shape(value: ir.Value) -> tuple[int, ...]:
    """Of a stored weight, [E, ..]."""
    while (node := value.producer()) is not None:
        value = input_of(node, 0)
    assert value.const_value is not None
    return tuple(int(size) for size in value.const_value.shape.numpy())


def skip_unused_experts(model: ir.Model) -> int:
    """Let ``model``, in float32 and with its weights in a file, read only the experts that a pass uses, in place.

    Returns how many mixtures there are.
    """
    layers = list(mixtures(model.graph))
    for mixture in layers:
        _skip_unused(model.graph, mixture)
    RemoveUnusedNodesPass()(model)
    return len(layers)


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
    for weight in made.weights:
        graph.register_initializer(weight)
    old, output = [*mixture.nodes, mixture.sum], mixture.sum.outputs[0]
    ir.convenience.replace_nodes_and_values(graph, mixture.sum, old, made.nodes, [output], [total])


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


def _part(value: ir.Value, expert: int, outside: Tape, branch: Tape) -> ir.Value:
    """One expert's part of a stored weight. Codes, and what makes numbers of them, are in the branch, to be fused."""
    nodes: list[ir.Node] = []
    part = StoredPart(expert, 0, stored_shape(value)[-2]).of(value, nodes)
    own = branch if any(node.op_type == "DequantizeLinear" for node in nodes) else outside
    given = [part, *(one for node in nodes for one in node.inputs if one is not None)]
    for weight in (one for one in given if one.const_value is not None):
        weight.name = f"{own.name}.{weight.name}"  # Another layer may read the same one.
        own.weights.append(weight)
    for node in nodes:
        own.add(node)
    return part
