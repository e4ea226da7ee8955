"""A draft's logits for some tokens alone: the last product is smaller, and the others are never drafted.

The text stays the target's own, as with every draft. Much of a small draft's step is its last product: of Qwen3-0.6B a
quarter of all bytes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from specbuild.graph import ops as graphs
from specbuild.weights.packed import lazy
from specrun.errors import UnsupportedModelError

_ELEMENTWISE = {"Add", "Cast", "Div", "Mul", "Tanh"}
"""Operators that may stand between the last product and the logits."""

Tokens = npt.NDArray[np.int64]


def draft_tokens(count: int, vocab_size: int, needed: set[int]) -> Tokens:
    """[count] ids in order: ``needed``, and those that come first. Tokenizers number tokens by how common they were."""
    chosen = {token for token in needed if 0 <= token < vocab_size}
    rest = (token for token in range(vocab_size) if token not in chosen)
    chosen.update(token for token, _ in zip(rest, range(count - len(chosen)), strict=False))
    return np.array(sorted(chosen), np.int64)


def keep_logits(model: ir.Model, tokens: Tokens, vocab_size: int) -> None:
    """Let the graph compute the logits of ``tokens``, and give -inf for the others, in place.

    Raises UnsupportedModelError where the logits come from something else than one product.
    """
    graph, logits = model.graph, model.graph.outputs[0]
    _narrow(graph, logits, tokens, vocab_size)
    slots = np.full(vocab_size, len(tokens), np.int64)
    slots[tokens] = np.arange(len(tokens))
    pads = graphs.constant(graph, "draft_vocab.pads", [0, 0, 0, 0, 0, 1])
    never = graphs.constant(graph, "draft_vocab.never", np.float32(-np.inf))
    places = graphs.constant(graph, "draft_vocab.slots", slots)
    name, kind, shape = logits.name, logits.type, logits.shape
    logits.name, logits.shape = "drafted_logits", None
    padded = ir.node("Pad", [logits, pads, never], name="draft_vocab.pad")
    spread = ir.node("Gather", [padded.outputs[0], places], {"axis": -1}, name="draft_vocab.spread")
    padded.outputs[0].name, padded.outputs[0].type = "draft_vocab.padded", kind
    spread.outputs[0].name, spread.outputs[0].type, spread.outputs[0].shape = name, kind, shape
    graph.extend([padded, spread])
    graph.outputs[0] = spread.outputs[0]
    RemoveUnusedNodesPass()(model)


def _narrow(graph: ir.Graph, value: ir.Value, tokens: Tokens, vocab_size: int) -> None:
    """Let ``value`` [.., V] have the columns ``tokens`` alone."""
    node = value.producer()
    if node is not None and node.op_type == "MatMul" and node.inputs[1] is not None:
        node.replace_input_with(1, _chosen(graph, node.inputs[1], tokens, vocab_size, 1))
        return
    if node is None or node.op_type not in _ELEMENTWISE:
        what = "an input" if node is None else node.op_type
        raise UnsupportedModelError(f"--draft_vocab_size: the logits come from {what}, not from one product")
    for index, given in enumerate(node.inputs):
        if given is None:
            continue
        if given.producer() is not None:
            _narrow(graph, given, tokens, vocab_size)
        elif given.shape is not None and len(given.shape) and given.shape[-1] == vocab_size:
            node.replace_input_with(index, _chosen(graph, given, tokens, vocab_size, len(given.shape) - 1))


def _chosen(graph: ir.Graph, value: ir.Value, tokens: Tokens, vocab_size: int, axis: int) -> ir.Value:
    """Constants with the columns of ``tokens`` along an axis. Raises UnsupportedModelError where they are none."""
    node = value.producer()
    if node is None:
        return _chosen_constant(graph, value, tokens, vocab_size, axis)
    if node.op_type not in ("Cast", "DequantizeLinear", "Transpose"):
        raise UnsupportedModelError(f"--draft_vocab_size: the head's weight comes from {node.op_type}")
    axis = 1 - axis if node.op_type == "Transpose" else axis
    inputs = [None if operand is None else _chosen(graph, operand, tokens, vocab_size, axis) for operand in node.inputs]
    narrowed = ir.node(node.op_type, inputs, dict(node.attributes), name=f"{node.name}.drafted")
    narrowed.outputs[0].name, narrowed.outputs[0].type = narrowed.name, node.outputs[0].type
    graph.insert_after(node, narrowed)
    return narrowed.outputs[0]


def _chosen_constant(graph: ir.Graph, value: ir.Value, tokens: Tokens, vocab_size: int, axis: int) -> ir.Value:
    stored = value.const_value
    if stored is None:
        raise UnsupportedModelError(f"--draft_vocab_size: the head's weight {value.name} is no constant")
    sizes = [int(size) for size in stored.shape.numpy()]
    axis = min(axis, len(sizes) - 1)
    if axis < 0 or sizes[axis] != vocab_size:
        return value
    sizes[axis] = len(tokens)
    name = f"{value.name}.drafted"
    chosen = lazy(stored.dtype, sizes, lambda: np.take(stored.numpy(), tokens, axis=axis), name)
    return graphs.initializer(graph, name, chosen)
