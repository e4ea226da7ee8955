"""Tensor parallel: of a model's graph, the graph that one of several ranks runs (Megatron-LM, arXiv 1909.08053).

A product whose input can be computed in parts is cut by rows: each rank multiplies its part, and an all-reduce adds up
what they give. What is in front of it is cut with it: products by columns, attention by heads, caches by heads. So a
layer has an all-reduce behind attention and one behind the MLP. A wide product that is left over, such as the
vocabulary's, is cut by columns, and an all-gather puts its output together. Everything else is the same on all ranks.

All ranks' graphs have the same nodes in the same order.
"""

from __future__ import annotations

import math

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from specbuild.sharding.collectives import gather_columns, reduce_sums
from specbuild.sharding.offsets import join_offsets, part_offsets
from specbuild.sharding.part import MisalignedError, divide, padded
from specbuild.sharding.parts import CACHE, Parts
from specbuild.sharding.rules import RULES
from specbuild.sharding.weights import is_constant, shape_of
from specrun.errors import BuildConfigError


def shard(model: ir.Model, rank: int, ranks: int) -> None:
    """Let ``model``, whose weights lie in a file, be what ``rank`` computes of it, in place. No weight is read.

    Raises BuildConfigError where heads or blocks of weights cannot be divided.
    """
    join_offsets(model)
    graph, parts = model.graph, Parts(model, rank, RULES)
    summands: set[ir.Value] = set()
    for node in list(graph):
        if not _is_product(node):
            if node.op_type in RULES and not parts.can_gain.isdisjoint(node.inputs):
                parts.can_gain.update(node.outputs)
            continue
        summand = _cut_rows(parts, node, ranks) if node.inputs[0] in parts.can_gain else None
        if summand is None:
            parts.can_gain.update(node.outputs)
            continue
        summands.add(summand)
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        total = parts.node("Add", summand, bias) if bias is not None else summand
        parts.insert(graph, node)
        parts.replace(node.outputs[0], total)
    _cut_caches(graph, parts)
    _ask_parts_for_sizes(graph, parts)
    RemoveUnusedNodesPass()(model)
    for node in list(graph):
        if _is_product(node) and not parts.has_made(node) and _is_wide(node, ranks):
            _cut_columns(graph, parts, node, ranks)
    reduce_sums(graph, parts, summands, ranks)
    RemoveUnusedNodesPass()(model)
    part_offsets(model)


def _is_product(node: ir.Node) -> bool:
    """Whether a weight is multiplied by what depends on the tokens."""
    if node.op_type != "MatMul":
        return False
    x, weight = node.inputs[:2]
    return is_constant(weight) and not is_constant(x) and weight is not None and len(shape_of(weight)) > 1


def _cut_rows(parts: Parts, node: ir.Node, ranks: int) -> ir.Value | None:
    """The rank's summand of a product; None where nothing in front of it can be cut. Raises BuildConfigError."""
    x, weight = node.inputs[:2]
    assert weight is not None
    size = number = shape_of(weight)[-2]
    tried = 0
    while True:
        part = divide(-1, size, number, ranks)
        if part is None or number == tried:
            raise BuildConfigError(
                f"--tp_size {ranks}: the {size} inputs of {node.name} can be divided into {number} parts, by heads and "
                f"blocks of weights, and not into {ranks}"
            )
        tried, before = number, parts.state()
        try:
            columns = parts.of(x, part)
            if parts.gains == before.gains:
                parts.restore(before)
                return None
            rows = parts.of(weight, part.at(-2))
            (summand,) = parts.like(node, [columns, rows])
            return summand
        except MisalignedError as error:
            parts.restore(before)
            number = math.gcd(number, error.parts)


def _cut_caches(graph: ir.Graph, parts: Parts) -> None:
    """Let caches be those of the rank's heads."""
    outputs = {str(value.name): number for number, value in enumerate(graph.outputs)}
    for number, old in enumerate(list(graph.inputs)):
        if old not in parts.caches:
            continue
        part, new = parts.caches[old]
        for use in list(old.uses()):
            if use.node.op_type == "Shape":
                use.node.replace_input_with(use.idx, new)
        graph.inputs[number] = new
        index = outputs[str(old.name).replace(CACHE, "present.")]
        whole = graph.outputs[index]
        local = parts.known[whole, part]
        local.name, whole.name = whole.name, f"{whole.name}.whole"
        local.type, local.shape = new.type, new.shape
        graph.outputs[index] = local


def _ask_parts_for_sizes(graph: ir.Graph, parts: Parts) -> None:
    """What asks for sizes of a whole value asks its part where these are the same: nothing else may need the whole."""
    known = {value: (part, local) for (value, part), local in parts.known.items()}
    order = {node: number for number, node in enumerate(graph)}
    for node in graph:
        value = node.inputs[0] if node.op_type == "Shape" else None
        shape = parts.shape(value)
        if value is None or shape is None or value not in known:
            continue
        part, local = known[value]
        producer = local.producer()
        if (
            producer in order
            and order[producer] < order[node]
            and len(shape) + part.axis not in _asked(node, len(shape))
        ):
            node.replace_input_with(0, local)


def _asked(node: ir.Node, axes: int) -> set[int]:
    """The axes whose sizes are read of a Shape of ``axes``."""
    first = node.attributes.get_int("start", 0)
    last = node.attributes.get_int("end", axes)
    axes_left = set(range(axes)[first:last])
    readers = [use.node for use in node.outputs[0].uses()]
    if first or len(axes_left) < axes or any(reader.op_type != "Gather" for reader in readers):
        return axes_left
    indices = [reader.inputs[1] for reader in readers]
    if any(index is None or index.const_value is None for index in indices):
        return axes_left
    return {int(number) for index in indices for number in index.const_value.numpy().reshape(-1)}  # type: ignore[union-attr]


def _is_wide(node: ir.Node, ranks: int) -> bool:
    """Whether a product has an output at least as wide as its input, as the vocabulary's does."""
    weight = node.inputs[1]
    assert weight is not None
    *others, rows, columns = shape_of(weight)
    return not others and columns >= max(rows, ranks * ranks)


def _cut_columns(graph: ir.Graph, parts: Parts, node: ir.Node, ranks: int) -> None:
    """Let ``node`` compute the rank's columns, and gather those of all."""
    x, weight = node.inputs
    output = node.outputs[0]
    shape = parts.shape(output)
    if weight is None or shape is None:
        return
    columns = shape_of(weight)[-1]
    part = padded(-1, columns, ranks)
    local = parts.like(node, [x, parts.of(weight, part)])[0]
    gathered = gather_columns(parts, local, len(shape), columns, ranks)
    parts.insert(graph, node)
    if output in graph.outputs:
        gathered.name, output.name, gathered.shape = output.name, f"{output.name}.whole", output.shape
    parts.replace(output, gathered)
