"""What the exporter leaves behind: constants to fold, duplicates, names of its own."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
from onnx_ir.passes.common import (
    ClearMetadataAndDocStringPass,
    CommonSubexpressionEliminationPass,
    DeduplicateInitializersPass,
    IdentityEliminationPass,
    InlinePass,
    LiftConstantsToInitializersPass,
    NameFixPass,
    OutputFixPass,
    RemoveUnusedNodesPass,
)
from onnxscript import optimizer
from onnxscript.rewriter import RewritePass, RewriteRuleSet
from onnxscript.rewriter.rules import common as rules

from specbuild.graph.ops import BATCH, CACHE, FOR_COMPILERS, KEPT, SEQUENCE, caches, inner_values
from specrun.engine_dir.contract import INPUT_IDS, KEEP_INDICES, LOGITS_INDICES, STATE_INDICES, WRITE_INDICES

_RULES = RewriteRuleSet(
    [
        *rules.mul_by_1_rule.commute(),
        *rules.add_0_rule.commute(),
        rules.sub_0_rule,
        rules.div_by_1_rule,
        rules.two_reshapes_matmul_reshape_rule,
        rules.one_reshape_matmul_reshape_rule,
        rules.cast_constant_of_shape_rule,
        rules.cast_constant_of_shape_without_value_rule,
        rules.collapse_slice_rule,
        rules.collapse_slice2_rule,
        rules.materialize_reshape_shape_rule,
        rules.min_min_rule,
        rules.max_max_rule,
        rules.min_max_rule,
        rules.max_min_rule,
        rules.cast_cast_rule,
        rules.no_op_cast_rule,
        rules.no_op_expand_rule,
        rules.reshape_reshape_rule,
        rules.no_op_transpose_rule,
        rules.transpose_transpose_rule,
        rules.unsqueeze_unsqueeze_rule,
        rules.squeeze_reshape_1d_rule,
    ]
)
"""onnxscript's rules for operators that language models have. One of the other rules looks at all pairs of nodes: with
all rules, tidying a model of 32 layers took six times as long."""


def tidy(model: ir.Model) -> ir.Model:
    """Fold what is small and constant, drop duplicates and leftovers, name the dimensions. In place."""
    share_tied_weights(model)
    _clear_metadata(model)
    fold_transposes(model)
    InlinePass()(model)
    for _ in range(2):  # As ``onnxscript.optimizer.optimize`` does it, with fewer rules.
        # The size limits keep out whatever would copy a weight in memory.
        optimizer.fold_constants(model, onnx_shape_inference=True, input_size_limit=1024, output_size_limit=1 << 16)
        RewritePass(_RULES)(model)
        RemoveUnusedNodesPass()(model)
    LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    for each in (DeduplicateInitializersPass, CommonSubexpressionEliminationPass, OutputFixPass, NameFixPass):
        each()(model)
    IdentityEliminationPass()(model)
    RemoveUnusedNodesPass()(model)
    name_dimensions(model)
    _clear_metadata(model)
    return model


def _clear_metadata(model: ir.Model) -> None:
    """Drop what the exporter notes down for people; what is noted for compilers stays."""
    kept = [
        (node, name, text)
        for node in model.graph
        for name, text in node.metadata_props.items()
        if name.startswith(FOR_COMPILERS)
    ]
    ClearMetadataAndDocStringPass()(model)
    for node, name, text in kept:
        node.metadata_props[name] = text


def name_dimensions(model: ir.Model) -> None:
    """Give the exporter's symbols (s16, s70, ...) the contract's names, and forget shapes inside the graph."""
    for value in inner_values(model):
        value.shape = None
    names: dict[str | None, tuple[str, ...]] = {INPUT_IDS: (BATCH, SEQUENCE), LOGITS_INDICES: (BATCH, KEPT)}
    names |= dict.fromkeys((WRITE_INDICES, STATE_INDICES, KEEP_INDICES), (BATCH,))
    for value in (*model.graph.inputs, *model.graph.outputs):
        if value.name in names:
            value.shape = ir.Shape(names[value.name])
    for value in caches(model):
        heads, width = value.shape[1], value.shape[3]  # type: ignore[index]
        if not isinstance(heads, int) or not isinstance(width, int):
            raise ValueError(f"{value.name}: heads and width must be numbers, found {value.shape}")
        value.shape = ir.Shape([BATCH, heads, CACHE, width])
    for value in (*model.graph.inputs, *model.graph.outputs):
        if str(value.name).startswith(("past_states.", "present_states.")):
            sizes = [size if isinstance(size, int) else None for size in value.shape or ()]
            value.shape = ir.Shape([BATCH, *(size or f"replays_{value.name}" for size in sizes[1:])])
    logits = model.graph.outputs[0]
    logits.shape = ir.Shape([BATCH, KEPT, logits.shape[2]])  # type: ignore[index]


def share_tied_weights(model: ir.Model) -> None:
    """Make initializers that are one tensor in memory one initializer in the file (tied embeddings)."""
    seen: dict[object, ir.Value] = {}
    for name, value in list(model.graph.initializers.items()):
        raw: Any = getattr(value.const_value, "raw", None)
        if not hasattr(raw, "data_ptr"):
            continue
        key = (raw.data_ptr(), tuple(raw.shape), raw.stride(), raw.dtype)
        first = seen.setdefault(key, value)
        if first is not value:
            value.replace_all_uses_with(first)
            model.graph.initializers.pop(name)


def write_out_gemms(model: ir.Model) -> None:
    """Make MatMul and Add of Gemm, which torch's exporter writes for the linear layer of a matrix."""
    for node in [node for node in model.graph if node.op_type == "Gemm"]:
        x, weight, bias = (*node.inputs, None)[:3]
        nodes: list[ir.Node] = []
        if node.attributes.get_int("transB", 0):
            nodes.append(ir.node("Transpose", [weight], {"perm": [1, 0]}, name=f"{node.name}.weight"))
            weight = nodes[0].outputs[0]
        nodes.append(ir.node("MatMul", [x, weight], name=f"{node.name}.product"))
        if bias is not None:
            nodes.append(ir.node("Add", [nodes[-1].outputs[0], bias], name=f"{node.name}.sum"))
        for new_node in nodes:
            new_node.outputs[0].name, new_node.outputs[0].type = new_node.name, node.outputs[0].type
        ir.convenience.replace_nodes_and_values(model.graph, node, [node], nodes, node.outputs, [nodes[-1].outputs[0]])


def fold_transposes(model: ir.Model) -> None:
    """Turn weights that are read later and have one reader, which transposes them, without reading them now."""
    for node in model.graph:
        weight = node.inputs[0] if node.op_type == "Transpose" else None
        transposed = getattr(weight.const_value, "transposed", None) if weight is not None else None
        if weight is None or transposed is None or not weight.is_initializer() or len(weight.uses()) != 1:
            continue
        old = node.outputs[0]
        tensor = transposed(node.attributes["perm"].as_ints(), str(old.name))
        new = ir.Value(name=old.name, shape=tensor.shape, type=ir.TensorType(tensor.dtype), const_value=tensor)
        model.graph.register_initializer(new)
        ir.convenience.replace_nodes_and_values(model.graph, node, [node], [], [old], [new])
        del model.graph.initializers[str(weight.name)]
