"""Mixtures of experts of which only the used experts are read.

The exported graph multiplies every token by every expert and weighs the results, mostly by zero: nothing in it depends
on the data, so every compiler takes it. ONNX Runtime can skip nodes while it runs. Here each expert becomes a branch
(``If``) that is taken where a token of the pass has chosen the expert, and that computes all tokens of the pass. So no
product's width depends on what other tokens have chosen, and results keep the dense form's bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from specbuild import graph as graphs


@dataclass(frozen=True)
class _Mixture:
    """The nodes of one dense mixture of E experts."""

    nodes: Sequence[ir.Node]
    """Those that compute the experts' weighted results [E, T, H], in order."""
    sum: ir.Node
    """Adds the results up: [T, H]."""

    @property
    def states(self) -> ir.Value:
        """What all experts read, [1, T, H]."""
        return _input(self.nodes[0], 0)

    @property
    def routing(self) -> ir.Value:
        """What results are multiplied by, [E, T, 1]: 0 where the token has not chosen the expert."""
        return _input(self.nodes[-1], 1)


def skip_unused_experts(model: ir.Model) -> int:
    """Let ``model``, whose weights lie in a file, read only the experts that a pass uses, in place.

    Returns how many mixtures there are.
    """
    mixtures = list(_mixtures(model.graph))
    for mixture in mixtures:
        _skip_unused(model.graph, mixture)
    RemoveUnusedNodesPass()(model)
    return len(mixtures)


def _mixtures(graph: ir.Graph) -> Iterator[_Mixture]:
    """Found by the marks of ``export.experts``."""
    per_expert: set[ir.Value | None] = set()
    for node in graph:
        mark = node.metadata_props.get(graphs.EXPERTS)
        if mark == graphs.EXPERTS_SUM:
            yield _Mixture(_made_of(_input(node, 0), per_expert), node)
        elif mark is not None or not per_expert.isdisjoint(node.inputs):
            per_expert.update(node.outputs)


def _made_of(value: ir.Value, per_expert: set[ir.Value | None]) -> list[ir.Node]:
    """The nodes in ``per_expert`` that ``value`` is computed by, in order."""
    found: dict[ir.Node, None] = {}

    def visit(value: ir.Value | None) -> None:
        node = value.producer() if value is not None and value in per_expert else None
        if node is not None and node not in found:
            for other in node.inputs:
                visit(other)
            found[node] = None

    visit(value)
    return list(found)


def _skip_unused(graph: ir.Graph, mixture: _Mixture) -> None:
    """Replace one mixture by a branch for each expert, which adds what the expert gives to the experts' before it."""
    made = _Tape(f"{mixture.sum.name}.experts")
    parts = {node: _input(node, 1) for node in mixture.nodes if graphs.EXPERTS in node.metadata_props}
    weights = {node: weight for node, value in parts.items() if (weight := _stored(value)) is not None}
    number = int(next(iter(weights.values())).shape.numpy()[0])
    split = {node: made.split(value, number) for node, value in parts.items() if node not in weights}
    axes = made.op("Constant", value=ir.tensor([1, 2], ir.DataType.INT64))
    is_chosen = made.op("Cast", mixture.routing, to=int(ir.DataType.BOOL))
    is_used = made.split(made.op("ReduceMax", is_chosen, axes, keepdims=1), number)
    total = made.op("ConstantOfShape", made.op("Shape", mixture.states))
    for expert in range(number):
        used, unused = _Tape(f"{made.name}.{expert}.used"), _Tape(f"{made.name}.{expert}.unused")
        results: dict[ir.Value | None, ir.Value] = {}
        for node in mixture.nodes:
            inputs = [results.get(value, value) for value in node.inputs]
            if node in weights:
                inputs[1] = _part(graph, made, parts[node], weights[node], expert)
            elif node in split:
                inputs[1] = split[node][expert]
            results.update(zip(node.outputs, used.copy(node, inputs), strict=True))
        used.op("Add", total, results[mixture.sum.inputs[0]])
        unused.op("Identity", total)
        total = made.op("If", is_used[expert], then_branch=used.graph(), else_branch=unused.graph())
    total = made.op("Squeeze", total, made.op("Constant", value=ir.tensor([0], ir.DataType.INT64)))
    old, output = [*mixture.nodes, mixture.sum], mixture.sum.outputs[0]
    ir.convenience.replace_nodes_and_values(graph, mixture.sum, old, made.nodes, [output], [total])


class _Tape:
    """Makes nodes in order, with names that nothing else in the model has."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.nodes: list[ir.Node] = []

    def op(self, op_type: str, *inputs: ir.Value | None, **attributes: Any) -> ir.Value:
        """One node with one output."""
        return self._add(ir.node(op_type, inputs, attributes))[0]

    def split(self, value: ir.Value, number: int) -> Sequence[ir.Value]:
        """The parts of ``value`` along its first axis."""
        return self._add(ir.node("Split", [value], {"axis": 0, "num_outputs": number}, num_outputs=number))

    def copy(self, node: ir.Node, inputs: Sequence[ir.Value | None]) -> Sequence[ir.Value]:
        """``node`` with other inputs."""
        attributes = list(node.attributes.values())
        return self._add(ir.Node(node.domain, node.op_type, inputs, attributes, num_outputs=len(node.outputs)))

    def graph(self) -> ir.Graph:
        """The nodes as a branch, which gives the last one's output."""
        return ir.Graph([], self.nodes[-1].outputs, nodes=self.nodes, name=self.name)

    def _add(self, node: ir.Node) -> Sequence[ir.Value]:
        node.name = f"{self.name}.{len(self.nodes)}"
        for number, value in enumerate(node.outputs):
            value.name = f"{node.name}.{number}"
        self.nodes.append(node)
        return node.outputs


def _stored(value: ir.Value) -> ir.ExternalTensor | None:
    """The tensor of a weight in a file, of which one expert's part can be taken; it may be cast."""
    producer = value.producer()
    if producer is not None and producer.op_type == "Cast":
        return _stored(_input(producer, 0))
    return value.const_value if isinstance(value.const_value, ir.ExternalTensor) else None


def _part(graph: ir.Graph, made: _Tape, value: ir.Value, stored: ir.ExternalTensor, expert: int) -> ir.Value:
    """One expert's [K, N] of a weight [E, K, N]."""
    _, *shape = stored.shape.numpy()
    part = graphs.part_of(stored, expert * math.prod(shape), shape, f"{stored.name}.{expert}")
    own = graphs.initializer(graph, str(part.name), part)
    cast = value.producer()
    return own if cast is None else made.copy(cast, [own])[0]


def _input(node: ir.Node, index: int) -> ir.Value:
    value = node.inputs[index]
    if value is None:
        raise ValueError(f"{node.name}: without input {index}")
    return value
