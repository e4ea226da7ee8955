"""The attention of a graph's layers: an Attention node, or what ``export.attention`` writes out in its place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import onnx_ir as ir
from onnxscript.rewriter.pattern import ANY_VALUE, OrValue, Pattern

from specbuild.graph.scales import constant


class AttentionLayer(NamedTuple):
    """Attention under a mask over a whole cache."""

    node: ir.Node
    """The one that gives the output [B, H, S, D]."""
    query: ir.Value
    """[B, H, S, D]"""
    keys: ir.Value
    """[B, H_kv, S_max, D]"""
    values: ir.Value
    """[B, H_kv, S_max, D]"""
    mask: ir.Value
    """bool [B, 1, S, S_max]: True where a key is seen."""
    scale: float | None = None
    """Factor of the scores; None: 1 / sqrt(D)."""
    softcap: float = 0.0
    """Scores become softcap * tanh(score / softcap); 0: they stay."""
    sinks: ir.Value | None = None
    """H scores that join the softmax of each query; their weights are dropped."""


def attention_layers(model: ir.Model) -> Iterator[AttentionLayer]:
    """Find those of a model that computes in float32, in the graph's order."""
    for node in list(model.graph):
        layer = None
        if node.op_type == "Attention":
            layer = _one_operator(node)
        elif node.op_type == "Reshape":
            layer = _written_out(model, node)
        if layer is not None:
            yield layer


def _one_operator(node: ir.Node) -> AttentionLayer | None:
    """None where a node hides keys by itself, or has other inputs or outputs."""
    others = [output for output in node.outputs[1:] if output.uses() or output.is_graph_output()]
    if others or node.attributes.get_int("is_causal") or len(node.inputs) != 4:
        return None
    query, keys, values, mask = node.inputs
    if query is None or keys is None or values is None or mask is None:
        return None
    scale = node.attributes["scale"].as_float() if "scale" in node.attributes else None
    softcap = node.attributes["softcap"].as_float() if "softcap" in node.attributes else 0.0
    return AttentionLayer(node, query, keys, values, mask, scale, softcap)


def _written_out(model: ir.Model, reshape: ir.Node) -> AttentionLayer | None:
    match = _PATTERN.match(model, model.graph, reshape, check_nodes_are_removable=False)
    if not match:
        return None
    bound: dict[str, Any] = match.bindings
    scale, cap, divisor = (_number(bound.get(name), otherwise) for name, otherwise in _NUMBERS.items())
    hidden = _number(bound["hidden"])
    if scale is None or cap is None or divisor != cap or hidden is None or hidden > _HIDDEN:
        return None
    query, keys, values, mask = (bound[name] for name in ("query", "keys", "values", "mask"))
    return AttentionLayer(reshape, query, keys, values, mask, scale, cap, bound.get("sinks"))


def _pattern(
    op: Any, query: Any, keys: Any, values: Any, mask: Any, sinks: Any, scale: Any, cap: Any, divisor: Any, hidden: Any
) -> Any:
    """What ``export.attention`` makes where it writes attention out."""
    turned = op.Transpose(op.Unsqueeze(keys, [2]), perm=[0, 1, 2, 4, 3])
    products = op.MatMul(op.Reshape(query, ANY_VALUE), turned)
    scaled = OrValue([products * scale, products])
    scores = OrValue([op.Tanh(scaled / divisor) * cap, scaled])
    seen = op.Where(op.Not(op.Unsqueeze(mask, [2])), hidden, scores)
    joined = op.Softmax(op.Concat(seen, op.Expand(sinks, ANY_VALUE), axis=-1), axis=-1)
    weights = OrValue([op.Slice(joined, [0], [-1], [4], [1]), op.Softmax(seen, axis=-1)])
    return op.Reshape(op.MatMul(weights, op.Unsqueeze(values, [2])), ANY_VALUE)


_PATTERN = Pattern(_pattern)
_NUMBERS = {"scale": 1.0, "cap": 0.0, "divisor": 0.0}
"""Constants of the pattern, and what they are where it has none."""
_HIDDEN = -1e30
"""The score of a hidden key at most."""


def _number(value: ir.Value | None, otherwise: float | None = None) -> float | None:
    """A constant; None where it is none."""
    if value is None:
        return otherwise
    tensor = constant(value)
    return float(tensor.numpy()) if tensor is not None and tensor.size == 1 else None
