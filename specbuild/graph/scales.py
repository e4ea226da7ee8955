"""Scales and offsets of quantized weights in the graph: see ``insert_qdq``, which puts them there."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy.typing as npt
import onnx_ir as ir

from specbuild.graph import ops as graphs
from specbuild.weights.packed import as_float32, block_sums, lazy, times_units


def make_numbers_of_scales(model: ir.Model) -> None:
    """Let constants in int8 that are scales or offsets of weights be floats of the graph's dtype, in place.

    They are computed when they are read. See ``Packed.scale_units``.
    """
    for node in [node for node in model.graph if node.op_type == "DequantizeLinear"]:
        codes, units = node.inputs[0], node.inputs[1]
        if codes is None or units is None or codes.const_value is None or units.const_value is None:
            continue
        if codes.dtype != ir.DataType.INT8 or not str(codes.name).endswith((".scales", ".offsets")):
            continue
        for use in list(node.outputs[0].uses()):
            reader = use.node  # DequantizeLinear of the weight, or Cast of offsets; or Transpose, or MatMul.
            dtype = reader.outputs[0].dtype or units.dtype or ir.DataType.FLOAT
            reader.attributes.pop("output_dtype", None)
            numbers = _numbers(model.graph, node, codes.const_value, units.const_value, dtype)
            reader.replace_input_with(use.idx, numbers)


def _numbers(
    graph: ir.Graph, node: ir.Node, codes: ir.TensorProtocol, units: ir.TensorProtocol, dtype: ir.DataType
) -> ir.Value:
    axis = node.attributes.get_int("axis", 1)
    channels = 1 - axis if "block_size" in node.attributes else axis

    def numbers() -> npt.NDArray[Any]:
        return times_units(as_float32(codes), as_float32(units), channels).astype(dtype.numpy())

    name = f"{node.outputs[0].name}.{dtype.name.lower()}"
    return graphs.initializer(graph, name, lazy(dtype, codes.shape.numpy(), numbers, name))


class Added(NamedTuple):
    """What is added to a node's only output: a product, and what computes its left factor."""

    add: ir.Node
    product: ir.Node
    left: ir.Node

    def are_offsets(self, x: ir.Value | None, inputs: int, block: int) -> bool:
        """Whether offsets of a weight's blocks, which the product's right factor is, are added to ``x`` times it."""
        return self.left.op_type == "MatMul" and self.left.inputs[0] is x and _adds_up(self.left, inputs, block, False)

    def are_rows_of_offsets(self, ids: ir.Value, inputs: int, block: int) -> bool:
        """Whether a table's offsets, of which the left factor has rows, are added to its rows."""
        return (
            self.left.op_type == "Gather" and self.left.inputs[1] is ids and _adds_up(self.product, inputs, block, True)
        )


def add_offsets(graph: ir.Graph, product: ir.Node, offsets: ir.Value, inputs: int, block: int, name: str) -> ir.Node:
    """Add to ``product`` what ``offsets`` [K / block, N] of its weight's blocks make of its input. In place.

    Returns the product with the offsets.
    """
    y = product.outputs[0]
    dtype = offsets.dtype or y.dtype
    assert dtype is not None
    adder = ir.tensor(block_sums(inputs, block).astype(dtype.numpy()), dtype=dtype)
    factor = graphs.initializer(graph, f"quantization.blocks.{inputs}.{block}", adder)
    sums = ir.node("MatMul", [product.inputs[0], factor], name=f"{name}.sums")
    shift = ir.node("MatMul", [sums.outputs[0], offsets], name=f"{name}.shift")
    total = ir.node("Add", [y, shift.outputs[0]], name=f"{name}.total")
    whole, later = total.outputs[0], [use for use in y.uses() if use.node is not total]
    for new_node in (sums, shift, total):
        new_node.outputs[0].name, new_node.outputs[0].type = new_node.name, ir.TensorType(dtype)
    graph.insert_after(product, [sums, shift, total])
    for use in later:
        use.node.replace_input_with(use.idx, whole)
    if y.is_graph_output():
        graph.outputs[graph.outputs.index(y)] = whole
        whole.name, y.name, whole.shape = y.name, whole.name, y.shape
    return shift


def added_to(node: ir.Node) -> Added | None:
    """None where nothing of that kind is."""
    uses = list(node.outputs[0].uses())
    if node.outputs[0].is_graph_output() or len(uses) != 1 or uses[0].node.op_type != "Add":
        return None
    add = uses[0].node
    other = add.inputs[1 - uses[0].idx]
    product = other.producer() if other is not None else None
    left = product.inputs[0].producer() if product is not None and product.inputs[0] is not None else None
    if product is None or product.op_type != "MatMul" or left is None:
        return None
    return Added(add, product, left)


def _adds_up(product: ir.Node, inputs: int, block: int, turned: bool) -> bool:
    """Whether a product's right factor adds up each block; turned: gives each number to all of a block."""
    tensor = constant(product.inputs[1])
    if not block or tensor is None:
        return False
    wanted = block_sums(inputs, block).T if turned else block_sums(inputs, block)
    return tuple(tensor.shape) == wanted.shape and bool((as_float32(tensor) == wanted).all())


def before_casts(value: ir.Value | None) -> ir.Value | None:
    """What ``value`` was before all the Casts in front of it."""
    while value is not None and (node := value.producer()) is not None and node.op_type == "Cast":
        value = node.inputs[0]
    return value


def constant(value: ir.Value | None) -> ir.TensorProtocol | None:
    """A constant, which Cast may stand behind."""
    value = before_casts(value)
    return None if value is None else value.const_value
