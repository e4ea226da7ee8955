"""Mixtures of experts of which only the used experts are read.

The exported graph multiplies every token by every expert and weighs the results, mostly by zero: nothing in it depends
on the data, so every compiler takes it. ONNX Runtime can skip nodes while it runs. Here each expert becomes a branch
(``If``) that is taken where a token of the pass has chosen the expert. A branch computes all tokens of the pass, so a
row's bits do not depend on what other tokens have chosen.
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
    """Let ``model``, in float32 and with its weights in a file, read only the experts that a pass uses, in place.

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
    stored = {node for node, value in parts.items() if _is_stored(value)}
    number = _shape(parts[mixture.nodes[0]])[0]
    split = {node: made.split(value, number) for node, value in parts.items() if node not in stored}
    is_used = made.split(_is_used(made, mixture), number)
    total = made.op("ConstantOfShape", made.op("Shape", mixture.states))
    for expert in range(number):
        used, unused = _Tape(f"{made.name}.{expert}.used"), _Tape(f"{made.name}.{expert}.unused")
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
    total = made.op("Squeeze", total, made.op("Constant", value=ir.tensor([0], ir.DataType.INT64)))
    for weight in made.weights:
        graph.register_initializer(weight)
    old, output = [*mixture.nodes, mixture.sum], mixture.sum.outputs[0]
    ir.convenience.replace_nodes_and_values(graph, mixture.sum, old, made.nodes, [output], [total])


def _beside_product(x: ir.Value | None, branch: _Tape) -> ir.Value | None:
    """The input of a product; where it is in 8 bits, its numbers are made of codes in the branch, to be fused."""
    node = x.producer() if x is not None else None
    return branch.copy(node, node.inputs)[0] if node is not None and node.op_type == "DequantizeLinear" else x


def _is_used(made: _Tape, mixture: _Mixture) -> ir.Value:
    """bool [E, 1, 1]: whether a token has chosen the expert."""
    axes = made.op("Constant", value=ir.tensor([1, 2], ir.DataType.INT64))
    return made.op("ReduceMax", made.op("Cast", mixture.routing, to=int(ir.DataType.BOOL)), axes, keepdims=1)


class _Tape:
    """Makes nodes in order, with names that nothing else in the model has."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.nodes: list[ir.Node] = []
        self.weights: list[ir.Value] = []
        """Initializers that belong to the nodes."""

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

    def part(self, value: ir.Value, expert: int, row: bool) -> ir.Value:
        """One expert's entry of an initializer, as an initializer; see ``_part``."""
        stored = value.const_value
        assert isinstance(stored, ir.ExternalTensor)
        _, *shape = _shape(value)
        first, shape = expert * math.prod(shape), shape[1:] if row else shape
        tensor = graphs.part_of(stored, first, shape, f"{self.name}.{expert}.{stored.name}")
        made = ir.Value(name=tensor.name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
        self.weights.append(made)
        return made

    def graph(self) -> ir.Graph:
        """The nodes as a branch, which gives the last one's output."""
        return ir.Graph([], self.nodes[-1].outputs, nodes=self.nodes, initializers=self.weights, name=self.name)

    def _add(self, node: ir.Node) -> Sequence[ir.Value]:
        node.name = f"{self.name}.{len(self.nodes)}"
        for number, value in enumerate(node.outputs):
            value.name = f"{node.name}.{number}"
        self.nodes.append(node)
        return node.outputs


_READS = ("Cast", "DequantizeLinear")
"""What stands between a stored weight and its product."""


def _is_stored(value: ir.Value) -> bool:
    """Whether ``value`` is a weight in a file, or its numbers, of which one expert's part can be taken."""
    node = value.producer()
    if node is not None:
        return node.op_type in _READS and all(other is not None and _is_stored(other) for other in node.inputs)
    return isinstance(value.const_value, ir.ExternalTensor)


def _shape(value: ir.Value) -> tuple[int, ...]:
    """Of a stored weight, [E, ..]."""
    while (node := value.producer()) is not None:
        value = _input(node, 0)
    assert value.const_value is not None
    return tuple(int(size) for size in value.const_value.shape.numpy())


def _part(value: ir.Value, expert: int, outside: _Tape, branch: _Tape, row: bool = False) -> ir.Value:
    """One expert's part of a stored weight. Codes, and what makes numbers of them, are in the branch, to be fused.

    row: of [E, 1, N] take [N], not [1, N].
    """
    node = value.producer()
    if node is None:
        return outside.part(value, expert, row)
    if node.op_type == "Cast":
        return outside.copy(node, [_part(_input(node, 0), expert, outside, outside, row)])[0]
    codes, *scales = (_input(node, index) for index in range(len(node.inputs)))
    groups = _shape(scales[0])[1:-1]  # Of scales [E] there are none; of [E, G, N] it is (G,).
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


def _input(node: ir.Node, index: int) -> ir.Value:
    value = node.inputs[index]
    if value is None:
        raise ValueError(f"{node.name}: without input {index}")
    return value
