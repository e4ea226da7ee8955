"""Weights with offsets are one constant while a graph is divided, and a product beside the product before and after.

See ``insert_qdq``: ``x @ weight`` is ``x @ codes * scales + (sums of x's blocks) @ offsets``.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from specbuild.graph.scales import add_offsets, added_to, before_casts
from specbuild.sharding.weights import WITH_OFFSETS, is_constant, shape_of


def join_offsets(model: ir.Model) -> None:
    """Let products by weights with offsets be one product each, in place."""
    for product in [node for node in model.graph if node.op_type == "MatMul"]:
        weight = product.inputs[1]
        dequantize = weight.producer() if weight is not None else None
        if weight is None or dequantize is None or dequantize.op_type != "DequantizeLinear" or not is_constant(weight):
            continue
        block, added = dequantize.attributes.get_int("block_size", 0), added_to(product)
        if added is None or not block or not added.are_offsets(product.inputs[0], shape_of(weight)[0], block):
            continue
        offsets = before_casts(added.product.inputs[1])
        if not is_constant(offsets):
            continue
        joined = ir.node(WITH_OFFSETS, [weight, offsets], {"block_size": block}, name=f"{product.name}.with_offsets")
        value = joined.outputs[0]
        value.name, value.type, value.shape = joined.name, weight.type, ir.Shape(shape_of(weight))
        model.graph.insert_before(product, joined)
        product.replace_input_with(1, value)
        added.add.outputs[0].replace_all_uses_with(product.outputs[0], replace_graph_outputs=True)
    RemoveUnusedNodesPass()(model)


def part_offsets(model: ir.Model) -> None:
    """The reverse of ``join_offsets``, in place."""
    graph = model.graph
    for joined in [node for node in graph if node.op_type == WITH_OFFSETS]:
        weight, offsets = joined.inputs
        assert weight is not None and offsets is not None
        inputs, block = shape_of(weight)[0], joined.attributes.get_int("block_size", 0)
        dtype = weight.dtype or ir.DataType.FLOAT
        if offsets.dtype not in (None, dtype):
            cast = ir.node("Cast", [offsets], {"to": int(dtype)}, name=f"{joined.name}.cast")
            graph.insert_before(joined, cast)
            offsets = cast.outputs[0]
            offsets.name, offsets.type = cast.name, ir.TensorType(dtype)
        for number, product in enumerate([use.node for use in joined.outputs[0].uses()]):
            product.replace_input_with(1, weight)
            add_offsets(graph, product, offsets, inputs, block, f"{joined.name}.{number}")
    RemoveUnusedNodesPass()(model)
