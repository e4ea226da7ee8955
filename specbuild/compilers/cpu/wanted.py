"""The tokens whose logits are wanted are taken in one operator, before the last normalization.

The exported graph normalizes all tokens of a pass, spreads the indices over a token's width, and gathers number by
number. Behind this, the last product can normalize its tokens itself (``fusions``).
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from specrun.engine_dir.contract import LOGITS_INDICES

_NORMALIZATIONS = ("RMSNormalization", "LayerNormalization")


def take_wanted_tokens_first(model: ir.Model) -> None:
    """Take the tokens at logits_indices by GatherND, in front of a normalization that only they are needed of."""
    for node in [node for node in model.graph if node.op_type == "GatherElements"]:
        if (places := _places(node)) is not None:
            _replace(model.graph, node, places)
    RemoveUnusedNodesPass()(model)


def _places(gather: ir.Node) -> ir.Value | None:
    """logits_indices [B, K, 1], where a node takes whole tokens of [B, S, width] at them."""
    indices = gather.inputs[1]
    spread = indices.producer() if indices is not None else None
    axis = gather.attributes.get_int("axis", 0)
    if axis != 1 or spread is None or spread.op_type != "Expand" or (places := spread.inputs[0]) is None:
        return None
    column = places.producer()
    if column is None or column.op_type != "Unsqueeze" or column.inputs[0] is None or column.inputs[1] is None:
        return None
    axes = column.inputs[1].const_value
    is_last = axes is not None and axes.numpy().tolist() in ([-1], [2])
    return places if is_last and column.inputs[0].name == LOGITS_INDICES else None


def _normalization(tokens: ir.Value) -> ir.Node | None:
    """What normalizes tokens that nothing else reads."""
    node = tokens.producer()
    if node is None or node.op_type not in _NORMALIZATIONS or len(node.outputs) > 1:
        return None
    return None if tokens.is_graph_output() or len(tokens.uses()) > 1 else node


def _replace(graph: ir.Graph, gather: ir.Node, places: ir.Value) -> None:
    tokens, old = gather.inputs[0], gather.outputs[0]
    if tokens is None:
        raise ValueError(f"{gather.name}: without tokens")
    norm = _normalization(tokens)
    source = tokens if norm is None else norm.inputs[0]
    take = ir.node("GatherND", [source, places], {"batch_dims": 1}, name=f"{gather.name}.wanted")
    new_nodes, removed = [take], [gather]
    if norm is not None:
        new_nodes.append(ir.node(norm.op_type, [take.outputs[0], *norm.inputs[1:]], norm.attributes, name=norm.name))
        removed.append(norm)
    for node in new_nodes:
        node.outputs[0].name, node.outputs[0].type, node.outputs[0].shape = f"{node.name}.0", old.type, old.shape
    ir.convenience.replace_nodes_and_values(graph, gather, removed, new_nodes, [old], [new_nodes[-1].outputs[0]])
