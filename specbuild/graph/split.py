"""An ONNX graph in consecutive pieces, each small enough to run where the whole does not fit into memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from specbuild.graph import ops as graphs
from specbuild.graph.weight_slices import StoredPart, block_size, stored_tensor


class Piece(NamedTuple):
    """Some nodes of a graph as a model of their own; its weights stay in the whole model's file."""

    model: onnx.ModelProto
    inputs: list[str]
    outputs: list[str]
    later: set[str]
    """Names of all values that pieces behind this one need."""


def cut(model: ir.Model, most_bytes: int) -> Iterator[Piece]:
    """The nodes in order, in pieces whose weights take about ``most_bytes``; single weights may be larger."""
    whole = ir.to_proto(model)
    graph = whole.graph
    weights = {tensor.name: tensor for tensor in graph.initializer}
    types = {value.name: value for value in (*graph.value_info, *graph.input, *graph.output)}
    results = {value.name for value in graph.output}
    pieces = list(_runs(graph, weights, most_bytes))
    needs = [{name for node in nodes for name in node.input if name} for nodes in pieces]
    later: set[str] = set()
    behind = [later := later | (need - weights.keys()) for need in reversed([*needs[1:], set()])][::-1]
    for number, nodes in enumerate(pieces):
        produced = {name for node in nodes for name in node.output if name}
        inputs = sorted(needs[number] - produced - weights.keys())
        outputs = sorted(produced & (behind[number] | results))
        piece = onnx.GraphProto(name=f"piece {number}", node=nodes)
        piece.initializer.extend(weights[name] for name in sorted(needs[number] & weights.keys()))
        piece.input.extend(types[name] for name in inputs)
        piece.output.extend(types[name] for name in outputs)
        proto = onnx.ModelProto(ir_version=whole.ir_version, opset_import=whole.opset_import, graph=piece)
        yield Piece(proto, inputs, outputs, behind[number])


def _runs(graph: onnx.GraphProto, weights: dict[str, Any], most_bytes: int) -> Iterator[list[onnx.NodeProto]]:
    """The nodes, cut where the next one's weights would be too much."""
    nodes: list[onnx.NodeProto] = []
    held: set[str] = set()
    for node in graph.node:
        new = {name for name in node.input if name in weights}
        if nodes and new - held and sum(_nbytes(weights[name]) for name in new | held) > most_bytes:
            yield nodes
            nodes, held = [], set()
        nodes.append(node)
        held |= new
    yield nodes


def _nbytes(tensor: onnx.TensorProto) -> int:
    kind = ir.DataType(tensor.data_type)
    return int(math.prod(tensor.dims) * (4 if kind == ir.DataType.FLOAT4E2M1 else kind.itemsize))  # As it is run.


def split_products(model: ir.Model, elements: int) -> None:
    """Multiply by weights of more than ``elements`` in slices, each a weight of its own that lies in the same file.

    So casting, transposing or dequantizing one copies a slice only, and pieces can be cut between them.
    """
    for product in [node for node in model.graph if node.op_type == "MatMul"]:
        factor = product.inputs[1]
        transpose = factor.producer() if factor is not None else None
        transposed = transpose is not None and transpose.op_type == "Transpose"
        weight = transpose.inputs[0] if transpose is not None and transposed else factor
        tensor = stored_tensor(weight)
        if weight is None or tensor is None or tensor.size <= elements or len(tensor.shape) > 3:
            continue
        if len(tensor.shape) == 3:
            nodes = _by_expert(product, weight, elements)
        elif transposed:
            nodes = _by_column(product, list(_slices(weight, elements)))
        else:
            nodes = _by_row(product.inputs[0], _slices(weight, elements))
        _replace(model.graph, product, nodes)
    RemoveUnusedNodesPass()(model)


class _Slice(NamedTuple):
    """Rows of a matrix, or of one expert's."""

    first: int
    last: int
    nodes: list[ir.Node]
    """Nodes that dequantize the slice."""
    weight: ir.Value


def _slices(weight: ir.Value, elements: int, expert: int | None = None) -> Iterator[_Slice]:
    """A stored matrix, or one expert's, in slices of about ``elements``."""
    tensor = stored_tensor(weight)
    assert tensor is not None
    rows, columns = (int(size) for size in tensor.shape.numpy()[-2:])
    step = max(1, elements // columns)
    if (block := block_size(weight)) and block < rows:  # Blocks of codes stay whole.
        step = max(block, step // block * block)
    for first in range(0, rows, step):
        part = StoredPart(expert, first, min(first + step, rows))
        nodes: list[ir.Node] = []
        value = part.of(weight, nodes)
        yield _Slice(part.first, part.last, nodes, value)


def _by_row(x: ir.Value | None, slices: Iterable[_Slice]) -> list[ir.Node]:
    """Sums over parts of the inner axis, one added to the others at a time."""
    nodes: list[ir.Node] = []
    total: ir.Value | None = None
    for first, last, dequantize, part in slices:
        range_nodes = _range_of(x, first, last, axis=-1)
        nodes += [*range_nodes, *dequantize, ir.node("MatMul", [range_nodes[-1].outputs[0], part])]
        if total is not None:
            nodes.append(ir.node("Add", [total, nodes[-1].outputs[0]]))
        total = nodes[-1].outputs[0]
    return nodes


def _by_column(product: ir.Node, slices: Iterable[_Slice]) -> list[ir.Node]:
    """Columns of the result side by side; the weight lies the other way round, so that its rows are the columns."""
    nodes: list[ir.Node] = []
    results = []
    for _, _, dequantize, part in slices:
        turned = ir.node("Transpose", [part], {"perm": [1, 0]})
        nodes += [*dequantize, turned, ir.node("MatMul", [product.inputs[0], turned.outputs[0]])]
        results.append(nodes[-1].outputs[0])
    return [*nodes, ir.node("Concat", results, {"axis": -1})]


def _by_expert(product: ir.Node, weight: ir.Value, elements: int) -> list[ir.Node]:
    """Each expert's product by itself."""
    nodes: list[ir.Node] = []
    results = []
    tensor = stored_tensor(weight)
    assert tensor is not None
    for expert in range(int(tensor.shape.numpy()[0])):
        x = product.inputs[0]
        if product.metadata_props.get(graphs.EXPERTS) != graphs.EXPERTS_FIRST:
            nodes += _range_of(x, expert, expert + 1, axis=0)
            x = nodes[-1].outputs[0]
        nodes += _by_row(x, _slices(weight, elements, expert))
        results.append(nodes[-1].outputs[0])
    return [*nodes, ir.node("Concat", results, {"axis": 0})]


def _range_of(x: ir.Value | None, start: int, stop: int, axis: int) -> list[ir.Node]:
    """Part of a product's other factor."""
    bounds = [ir.tensor([value], ir.DataType.INT64) for value in (start, stop, axis)]
    constants = [ir.node("Constant", [], {"value": bound}) for bound in bounds]
    return [*constants, ir.node("Slice", [x, *(constant.outputs[0] for constant in constants)])]


def _replace(graph: ir.Graph, product: ir.Node, nodes: list[ir.Node]) -> None:
    for index, node in enumerate(nodes):
        node.name = f"{product.name}.slice.{index}"
        (value,) = node.outputs
        value.name = node.name
        constant = node.op_type == "Constant"
        value.type = ir.TensorType(ir.DataType.INT64) if constant else product.outputs[0].type
    inputs = [value for node in nodes for value in node.inputs if value is not None]
    for weight in dict.fromkeys(value for value in inputs if value.const_value is not None and value.graph is None):
        if (same := graph.initializers.get(str(weight.name))) is not None:  # Scales of several slices.
            weight.replace_all_uses_with(same)
        else:
            graph.register_initializer(weight)
    old, new = product.outputs[0], nodes[-1].outputs[0]
    ir.convenience.replace_nodes_and_values(graph, product, [product], nodes, [old], [new])
