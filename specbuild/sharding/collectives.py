"""Where ranks tell each other what they have computed: nodes ``DistCollective``, as TensorRT has them."""

from __future__ import annotations

from typing import Literal

import numpy as np
import onnx_ir as ir

from specbuild.graph.ops import initializer
from specbuild.sharding.parts import Parts
from specbuild.sharding.weights import is_constant, shape_of

COLLECTIVE = "DistCollective"
_LINEAR = {"Reshape", "Transpose", "Unsqueeze", "Squeeze", "ReduceSum", "Identity", "Mul", "Div"}
"""Operators that give the sum of what they give for the summands, where the other inputs are whole."""


def collective(parts: Parts, value: ir.Value, operation: Literal["all_reduce", "all_gather"], ranks: int) -> ir.Value:
    """What all ranks have of ``value``: their sum, or theirs one behind the other on the first axis."""
    reduction = "sum" if operation == "all_reduce" else "none"
    return parts.node(
        COLLECTIVE, value, collective_operation=operation, reduce_op=reduction, root=-1, group_size=0, nb_rank=ranks
    )


def gather_columns(parts: Parts, value: ir.Value, axes: int, columns: int, ranks: int) -> ir.Value:
    """The last axis of ``value``, which has so many axes, of all ranks, less what is behind ``columns``."""
    all_ranks = collective(parts, parts.node("Unsqueeze", value, parts.numbers([0])), "all_gather", ranks)
    rows = parts.node("Transpose", all_ranks, perm=[*range(1, axes), 0, axes])
    rows_last = parts.node("Reshape", rows, parts.numbers([*[0] * (axes - 1), -1]))
    return parts.slice(rows_last, -1, 0, columns) if columns % ranks else rows_last


def reduce_sums(graph: ir.Graph, parts: Parts, summands: set[ir.Value], ranks: int) -> None:
    """Add up what the ranks give: as late as possible, so that it is done once for several sums, and on few numbers."""
    for node in list(graph):
        inputs = [value for value in node.inputs if value is not None and value in summands]
        if inputs and _is_linear(node, summands) and all(len(value.uses()) == 1 for value in inputs):
            _add_bias_once(graph, parts, node, summands)
            summands.update(node.outputs)
            summands.difference_update(inputs)
            continue
        for value in inputs:
            producer, readers = value.producer(), list(value.uses())
            assert producer is not None
            total = collective(parts, value, "all_reduce", ranks)
            for reader in readers:
                reader.node.replace_input_with(reader.idx, total)
            parts.insert(graph, producer, behind=True)
            summands.discard(value)


def _is_linear(node: ir.Node, summands: set[ir.Value]) -> bool:
    indices = [number for number, value in enumerate(node.inputs) if value in summands]
    if node.op_type == "Add":
        return len(indices) == 2 or is_constant(node.inputs[1 - indices[0]])
    return node.op_type in _LINEAR and (indices == [0] or (indices == [1] and node.op_type == "Mul"))


def _add_bias_once(graph: ir.Graph, parts: Parts, node: ir.Node, summands: set[ir.Value]) -> None:
    """A constant that is added to summands is added by the first rank alone."""
    for index, bias in enumerate(node.inputs):
        if node.op_type != "Add" or bias is None or bias in summands or not parts.rank:
            continue
        assert bias.dtype is not None
        name = f"{bias.name}.none"
        zeros = ir.Tensor(np.zeros(shape_of(bias), bias.dtype.numpy()), dtype=bias.dtype, name=name)
        node.replace_input_with(index, initializer(graph, name, zeros))
