"""Attention written out in MatMul and Softmax, for a compiler that cannot have the operator beside loops."""

from __future__ import annotations

import onnx.parser
import onnx_ir as ir
from onnx_ir.passes.common import InlinePass

_DOMAIN, _NAME = "specbuild", "PlainAttention"
_FUNCTION = onnx.parser.parse_function("""
<domain: "specbuild", opset_import: ["" : 24]>
PlainAttention <scale> (query, key, value, mask) => (output)
{
    group_axis = Constant <value_ints: ints = [2]> ()
    rest = Constant <value_ints: ints = [-1]> ()
    shape = Shape (query)
    batch_axis = Shape <start: int = 0, end: int = 1> (query)
    head_axis = Shape <start: int = 1, end: int = 2> (key)
    query_axes = Shape <start: int = 2, end: int = 4> (query)
    grouped = Concat <axis: int = 0> (batch_axis, head_axis, rest, query_axes)
    queries = Reshape (query, grouped)
    keys = Unsqueeze (key, group_axis)
    values = Unsqueeze (value, group_axis)
    masks = Unsqueeze (mask, group_axis)
    turned = Transpose <perm: ints = [0, 1, 2, 4, 3]> (keys)
    products = MatMul (queries, turned)
    wide = Cast <to: int = 1> (products)
    scale = Constant <value_float: float = @scale> ()
    scaled = Mul (wide, scale)
    lowest = Constant <value_float: float = -1e30> ()
    seen = Where (masks, scaled, lowest)
    weights = Softmax <axis: int = -1> (seen)
    narrow = CastLike (weights, value)
    outputs = MatMul (narrow, values)
    output = Reshape (outputs, shape)
}
""")


def write_out_attention(model: ir.Model) -> int:
    """Replace every Attention of keys and values [B, H_kv, S_max, D] under a mask. In place; returns how many."""
    nodes = [node for node in model.graph if node.op_type == "Attention" and node.domain == ""]
    for node in nodes:
        node.domain, node.op_type = _DOMAIN, _NAME
    if nodes:
        function = ir.serde.deserialize_function(_FUNCTION)
        model.functions[function.identifier()] = function
        InlinePass()(model)
        model.opset_imports.pop(_DOMAIN, None)
    return len(nodes)
