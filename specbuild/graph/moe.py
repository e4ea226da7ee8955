"""Mixtures of experts in a graph: where they are, and what writes one anew."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from specbuild.graph import ops as graphs
from specbuild.graph.ops import input_of


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

    def part(self, value: ir.Value, expert: int, row: bool) -> ir.Value:
        """One expert's entry of an initializer, as an initializer. row: of [E, 1, N] take [N], not [1, N]."""
        stored = value.const_value
        assert stored is not None
        _, *shape = stored_shape(value)
        first, shape = expert * math.prod(shape), shape[1:] if row else shape
        name = f"{self.name}.{expert}.{stored.name}"
        tensor: ir.TensorProtocol
        if isinstance(stored, ir.ExternalTensor):
            tensor = graphs.part_of(stored, first, shape, name)
        else:  # Few numbers are in the graph itself.
            tensor = ir.tensor(stored.numpy()[expert].reshape(shape), name=name)
        made = ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(tensor.dtype), const_value=tensor)
        self.weights.append(made)
        return made

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


def replace(graph: ir.Graph, mixture: Mixture, made: Tape, total: ir.Value) -> None:
    """Let ``total``, which the nodes of ``made`` compute, stand where the mixture's sum is."""
    for weight in made.weights:
        graph.register_initializer(weight)
    old, output = [*mixture.nodes, mixture.sum], mixture.sum.outputs[0]
    ir.convenience.replace_nodes_and_values(graph, mixture.sum, old, made.nodes, [output], [total])


def rewrite(model: ir.Model, rewrite_one: Callable[[ir.Graph, Mixture], None]) -> int:
    """Let ``rewrite_one`` replace every mixture of ``model``, in place. Returns how many there are."""
    layers = list(mixtures(model.graph))
    for mixture in layers:
        rewrite_one(model.graph, mixture)
    RemoveUnusedNodesPass()(model)
    return len(layers)
