"""Norms that no product takes in, by an operator of our own: those of heads, and those behind products, as in Gemma 3.

It normalizes numbers that stand side by side, so queries and keys need not be divided into heads before.
"""

from __future__ import annotations

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from specbuild.compilers.cpu.attention import OPERATOR as ATTENTION
from specbuild.compilers.cpu.attention import PACKED_OPERATOR as PACKED_ATTENTION
from specbuild.compilers.cpu.fusions import normalizes, residual_of, residual_sum, scale_length
from specrun.cpu_operators import DOMAIN

RMS_NORM = "RMSNorm"
_RESIDUAL = 2
"""Position of the input that is added."""


def use_own_norms(model: ir.Model) -> None:
    """Put the operator in place of standard norms of the last axis, and of sums with the residual stream, in place."""
    graph = model.graph
    for node in [node for node in graph if node.op_type == "RMSNormalization"]:
        scale = node.inputs[1]
        if node.attributes.get_int("axis", -1) != -1 or scale is None or scale_length(scale) is None:
            continue
        _replace(graph, node)
    for node in [node for node in graph if node.op_type in (ATTENTION, PACKED_ATTENTION)]:
        _answer_as_queries(node)
    RemoveUnusedNodesPass()(model)


def _replace(graph: ir.Graph, node: ir.Node) -> None:
    x, scale = node.inputs[:2]
    assert x is not None and scale is not None
    (old,) = node.outputs
    view, add = x.producer(), None
    inputs: list[ir.Value | None] = [x, scale]
    if view is not None and view.op_type == "Reshape" and all(_takes_any_axes(use.node, use.idx) for use in old.uses()):
        inputs[0] = view.inputs[0]
    elif found := residual_sum(old, scale_length(scale)):
        add, residual = found
        inputs.append(residual)
    epsilon = ir.AttrFloat32("epsilon", node.attributes.get_float("epsilon", 1e-5))
    norm = ir.Node(DOMAIN, RMS_NORM, inputs, [epsilon], name=node.name)
    (new,) = norm.outputs
    new.name, new.dtype = old.name, ir.DataType.FLOAT
    removed, result = ([add, node], add.outputs[0]) if add else ([node], old)
    ir.convenience.replace_nodes_and_values(graph, removed[0], removed, [norm], [result], [new])


def _takes_any_axes(node: ir.Node, index: int) -> bool:
    """Whether an input of a node is queries or keys of our attention, in any division into axes."""
    return node.op_type in (ATTENTION, PACKED_ATTENTION) and index < 2


def _answer_as_queries(attention: ir.Node) -> None:
    """Let attention divide its answers as normalized queries are, which a product reads without a Reshape then.

    That is so where both products belong to one residual stream: the first normalizes it, and what the last gives is
    added to it. Values are as wide as keys.
    """
    queries, keys, values = (attention.inputs[index] for index in (0, 3, 4))
    norm = queries.producer() if queries is not None else None
    product = norm.inputs[0].producer() if norm is not None and norm.op_type == RMS_NORM and norm.inputs[0] else None
    view = _only_reader(attention.outputs[0])
    if product is None or not normalizes(product) or view is None or view.op_type != "Reshape":
        return
    if attention.op_type == ATTENTION and _last_size(keys) != _last_size(values):
        return
    last = _only_reader(view.outputs[0])
    after = _only_reader(last.outputs[0]) if last is not None and len(last.outputs) == 1 else None
    added = residual_of(last) if last is not None else None
    if added is None and after is not None and after.op_type == RMS_NORM and len(after.inputs) > _RESIDUAL:
        added = after.inputs[_RESIDUAL]
    if last is None or added is not product.inputs[0]:
        return
    attention.attributes["as_queries"] = ir.AttrInt64("as_queries", 1)
    attention.outputs[0].shape = None
    view.outputs[0].replace_all_uses_with(attention.outputs[0])


def _only_reader(value: ir.Value) -> ir.Node | None:
    uses = list(value.uses())
    return uses[0].node if len(uses) == 1 and not value.is_graph_output() else None


def _last_size(value: ir.Value | None) -> object:
    return value.shape[-1] if value is not None and value.shape is not None else None
