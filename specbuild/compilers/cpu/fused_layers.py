"""Joins our own operators into one node, ``FusedLayers``: specrun/cpu_operators/fused_layers.cpp says what it takes.

Between two nodes ONNX Runtime spends microseconds, which is a fifth of a small model's step.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence

import onnx_ir as ir

from specbuild.compilers.cpu.collectives import COLLECTIVES
from specrun.cpu_operators import DOMAIN

OPERATOR = "FusedLayers"
_LEFT_OUT = -1


def fuse_layers(graph: ir.Graph) -> int:
    """Join nodes of our own operators that can run one after the other. In place; returns how many are stages now."""
    if any(kind.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for kind in _attributes(graph)):
        return 0  # Inner graphs read values of outer ones.
    stages = 0
    nodes: list[ir.Node] = []
    for run in _runs(graph):
        if len(run) > 1 and run[0].domain == DOMAIN:
            stages += len(run)
            nodes.append(_fuse(graph, run))
        else:
            nodes += run
    kept = set(nodes)
    graph.remove([node for node in graph if node not in kept], safe=True)
    graph.remove(list(graph))
    graph.extend(nodes)
    return stages


def split_layers(graph: ir.Graph) -> None:
    """Undo ``fuse_layers``, for those who look at an engine's operators. In place."""
    for fused in [node for node in graph if node.op_type == OPERATOR]:
        arguments = iter(fused.attributes["arguments"].as_ints())
        values = dict[int, ir.Value | None](enumerate([*fused.inputs, *fused.outputs])) | {_LEFT_OUT: None}
        nodes = []
        for index, operator in enumerate(fused.attributes["stages"].as_string().split()):
            inputs = [values[next(arguments)] for _ in range(next(arguments))]
            numbers = [next(arguments) for _ in range(next(arguments))]
            prefix = f"{index}."
            attributes = [
                ir.Attr(name.removeprefix(prefix), kind.type, kind.value)
                for name, kind in fused.attributes.items()
                if name.startswith(prefix)
            ]
            node = ir.Node(DOMAIN, operator, inputs, attributes, num_outputs=len(numbers), name=f"{fused.name}.{index}")
            values |= zip(numbers, node.outputs, strict=True)
            nodes.append(node)
        first = len(fused.inputs)
        results = [value for number, value in values.items() if value and first <= number < first + len(fused.outputs)]
        ir.convenience.replace_nodes_and_values(graph, fused, [fused], nodes, fused.outputs, results)


def _attributes(graph: ir.Graph) -> Iterator[ir.Attr]:
    return (attribute for node in graph for attribute in node.attributes.values())


def _runs(graph: ir.Graph) -> Iterator[list[ir.Node]]:
    """All nodes in an order in which they can run: in turns those of our own operators, and others.

    Others go first, so that few runs of ours are long ones.
    """
    nodes = list(graph)
    numbers = {node: number for number, node in enumerate(nodes)}
    users = [[numbers[user] for value in node.outputs for user, _ in value.uses()] for node in nodes]
    # All ranks meet at collectives in one order, though their other nodes may differ.
    collectives = [node for node in nodes if node.op_type in COLLECTIVES]
    collectives.sort(key=lambda node: node.attributes["number"].as_int())
    for sooner, later in itertools.pairwise(numbers[node] for node in collectives):
        users[sooner].append(later)
    missing = Counter(itertools.chain(*users))
    ready: dict[bool, list[int]] = {False: [], True: []}
    for number, node in enumerate(nodes):
        if not missing[number]:
            ready[node.domain == DOMAIN].append(number)
    is_own = False
    while ready[False] or ready[True]:
        run: list[int] = []
        while ready[is_own]:
            run.append(heapq.heappop(ready[is_own]))
            for number in users[run[-1]]:
                missing[number] -= 1
                if not missing[number]:
                    heapq.heappush(ready[nodes[number].domain == DOMAIN], number)
        if run:
            yield [nodes[number] for number in run]
        is_own = not is_own


def _fuse(graph: ir.Graph, run: Sequence[ir.Node]) -> ir.Node:
    """A node that computes what ``run`` does. Others use its outputs from now on."""
    inside = set(run)
    inputs = list(
        dict.fromkeys(value for node in run for value in node.inputs if value and value.producer() not in inside)
    )
    results = set(graph.outputs)
    outputs = [
        value
        for node in run
        for value in node.outputs
        if value in results or any(user not in inside for user, _ in value.uses())
    ]
    numbers = {value: number for number, value in enumerate([*inputs, *outputs])}
    slots = _slots(run, set(numbers))
    numbers |= {value: len(inputs) + len(outputs) + slot for value, slot in slots.items()}
    arguments: list[int] = []
    attributes: list[ir.Attr] = []
    for index, node in enumerate(run):
        read = [_LEFT_OUT if value is None else numbers[value] for value in node.inputs]
        written = [numbers[value] for value in node.outputs]
        arguments += [len(read), *read, len(written), *written]
        attributes += [ir.Attr(f"{index}.{name}", kind.type, kind.value) for name, kind in node.attributes.items()]
    attributes += [
        ir.AttrString("stages", " ".join(node.op_type for node in run)),
        ir.AttrInt64s("arguments", arguments),
    ]
    fused = ir.Node(
        DOMAIN, OPERATOR, inputs, attributes, num_outputs=len(outputs), name=f"fused.{run[0].outputs[0].name}"
    )
    for output, new in zip(outputs, fused.outputs, strict=True):
        new.name, new.type, new.shape = output.name, output.type or ir.TensorType(ir.DataType.FLOAT), output.shape
        output.name = None
        ir.convenience.replace_all_uses_with(output, new, replace_graph_outputs=True)
    return fused


def _slots(run: Sequence[ir.Node], named: set[ir.Value]) -> dict[ir.Value, int]:
    """Slots of the values that only ``run`` reads. A slot is free again behind the last stage that reads its value."""
    last_use = {value: index for index, node in enumerate(run) for value in node.inputs if value is not None}
    slots: dict[ir.Value, int] = {}
    free: list[int] = []
    num_slots = 0
    for index, node in enumerate(run):
        inner = [value for value in node.outputs if value not in named]
        for value in inner:
            if not free:
                free.append(num_slots)
                num_slots += 1
            slots[value] = heapq.heappop(free)
        for used in {*node.inputs, *inner}:
            if used in slots and last_use.get(used, index) == index:
                heapq.heappush(free, slots[used])
    return slots
