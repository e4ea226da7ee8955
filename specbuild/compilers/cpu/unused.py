"""Padding that costs nothing on CPUs: unused tokens are NaN behind their embedding, and our operators leave NaN out.

A pass has as many tokens in each row as in the longest one. Rows have fewer where texts end, where a draft ends by
itself, or where it pays for other rows only.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from specbuild.compilers.cpu.attention import OPERATOR as ATTENTION
from specbuild.compilers.cpu.attention import PACKED_OPERATOR as PACKED_ATTENTION
from specbuild.compilers.cpu.attention import writes_features
from specbuild.compilers.cpu.norms import RMS_NORM
from specbuild.graph.ops import constant
from specrun.cpu_operators import DOMAIN
from specrun.engine_dir.contract import INPUT_IDS, UNUSED_TOKEN

_OWN = {"QuantizedMatMul", "FloatMatMul", "EmbeddingLookup", RMS_NORM, ATTENTION, PACKED_ATTENTION}
"""Our operators, which carry no NaN from a token to others."""
_BY_TOKEN = {
    *("Add", "Cast", "Clip", "Div", "Elu", "Erf", "Exp", "Gelu", "Mul", "Neg", "Pow", "Reciprocal", "Relu", "Sigmoid"),
    *("Softplus", "Sqrt", "Sub", "Swish", "Tanh", "Where", "LayerNormalization", "RMSNormalization"),
    *("Concat", "Expand", "Gather", "GatherElements", "GatherND", "Identity", "Reshape", "Slice", "Split", "Squeeze"),
    *("Transpose", "Unsqueeze", "Constant", "Cos", "Equal", "Less", "Range", "RotaryEmbedding", "Shape", "Sin"),
}
"""Standard operators that do not either: they compute numbers one by one, or those of a token, or move them."""


def mark_unused_tokens(model: ir.Model) -> bool:
    """Let tokens of ``UNUSED_TOKEN`` be NaN, in place, if no other token can see them. Returns whether it was done."""
    features = [node for node in model.graph if writes_features(node)]
    others = [node for node in model.graph if node not in features]
    if not all(node.op_type in (_OWN if node.domain == DOMAIN else _BY_TOKEN) for node in others):
        return False
    if any(node.inputs[1] is None or node.inputs[1].dtype != ir.DataType.FLOAT for node in features):
        return False
    ids = next(value for value in model.graph.inputs if value.name == INPUT_IDS)
    lookups = [use.node for use in ids.uses() if use.node.op_type == "Gather" and use.idx == 1]
    embeddings = [_embedding(node) for node in lookups if _is_table(node.inputs[0])]
    has_own = any(use.node.op_type == "EmbeddingLookup" for use in ids.uses())  # It gives NaN itself.
    if not (embeddings or has_own) or any(node.outputs[0].dtype != ir.DataType.FLOAT for node in embeddings):
        return False
    for node in embeddings:
        _mark(model.graph, ids, node)
    for node in features:
        _keep_finite(model.graph, ids, node)
    return True


def _is_table(value: ir.Value | None) -> bool:
    """Whether a value is [V, width]; the scales of a quantized embedding are [V]."""
    return value is not None and value.shape is not None and len(value.shape) == 2


def _embedding(lookup: ir.Node) -> ir.Node:
    """The node that gives float32: 16-bit numbers are cast when they were looked up."""
    uses = list(lookup.outputs[0].uses())
    is_cast = lookup.outputs[0].dtype != ir.DataType.FLOAT and len(uses) == 1 and uses[0].node.op_type == "Cast"
    return uses[0].node if is_cast else lookup


def _mark(graph: ir.Graph, ids: ir.Value, embedding: ir.Node) -> None:
    """Put NaN in place of an embedding [B, S, width] where a token is unused."""
    value = embedding.outputs[0]
    nodes = _replace_unused(graph, ids, np.nan, value, [-1])
    marked = nodes[-1]
    (output,) = marked.outputs
    output.name = marked.name = f"{value.name}.marked"
    output.dtype, output.shape = ir.DataType.FLOAT, value.shape
    value.replace_all_uses_with(output)
    marked.replace_input_with(2, value)
    graph.insert_after(embedding, nodes)


def _keep_finite(graph: ir.Graph, ids: ir.Value, scatter: ir.Node) -> None:
    """Write zeros for the features [B, 1, S, width] of unused tokens, as a head's attention reads what it hides."""
    nodes = _replace_unused(graph, ids, 0.0, scatter.inputs[1], [1, -1])
    scatter.replace_input_with(1, nodes[-1].outputs[0])
    graph.insert_before(scatter, nodes)


def _replace_unused(
    graph: ir.Graph, ids: ir.Value, number: float, value: ir.Value | None, axes: list[int]
) -> list[ir.Node]:
    """Nodes of which the last gives ``number`` where a token is unused, else ``value``.

    axes: those that ``value`` has beside the [B, S] of ``ids``.
    """
    unused = ir.node("Equal", [ids, constant(graph, "unused.id", np.int64(UNUSED_TOKEN))])
    each = ir.node("Unsqueeze", [unused.outputs[0], constant(graph, f"unused.axes.{len(axes)}", axes)])
    instead = constant(graph, f"unused.{number}", np.float32(number))
    return [unused, each, ir.node("Where", [each.outputs[0], instead, value])]
