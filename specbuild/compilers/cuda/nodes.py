"""Finds nodes of a graph by what they read and by who reads them."""

from __future__ import annotations

import onnx_ir as ir

from specbuild.compilers.cpu.fusions import GELU_GATED, SILU_GATED
from specbuild.graph.scales import constant
from specrun.engine_dir.layers import Activation

PRODUCTS, LOOKUP, NORM = ("FloatMatMul", "QuantizedMatMul"), "EmbeddingLookup", "RMSNormalization"
ACTIVATION_OF: dict[int, Activation] = {SILU_GATED: "silu", GELU_GATED: "gelu_tanh"}
"""Activations by the prologues of products."""


class UnsupportedLayerError(Exception):
    """A graph that is no decoder of such layers, or one that the kernels do not support."""


def other_operand(node: ir.Node, value: ir.Value) -> ir.Value | None:
    """The second operand of a sum."""
    return node.inputs[1] if node.inputs[0] is value else node.inputs[0]


def readers(node: ir.Node) -> list[ir.Node]:
    """All nodes that read what a node computes."""
    return [use.node for output in node.outputs for use in output.uses()]


def only_reader(value: ir.Value, kind: str) -> ir.Node | None:
    """The only node that reads a value, where it is of a kind."""
    readers = [use.node for use in value.uses()]
    return readers[0] if len(readers) == 1 and readers[0].op_type == kind else None


def producer(value: ir.Value | None, *kinds: str) -> ir.Node:
    """The node that computes a value, of one of some kinds. Raises UnsupportedLayerError where it is another one."""
    node = value.producer() if value is not None else None
    if node is None or (kinds and node.op_type not in kinds):
        got = node.op_type if node is not None else "an input"
        raise UnsupportedLayerError(f"{value.name if value is not None else 'nothing'} comes from {got}")
    return node


def before_views(value: ir.Value | None) -> ir.Value | None:
    """What is reshaped to a value."""
    while value is not None and (node := value.producer()) is not None and node.op_type == "Reshape":
        value = node.inputs[0]
    return value


def behind_views(value: ir.Value) -> ir.Value:
    """What a value is reshaped to, where nothing else reads it."""
    while (view := only_reader(value, "Reshape")) is not None:
        value = view.outputs[0]
    return value


def bounds_of_slice(node: ir.Node, value: ir.Value | None, size: int) -> tuple[int, int]:
    """First index and size of the part of the last axis that a Slice or Split takes."""
    if node.op_type == "Split":
        number, count = next(i for i, output in enumerate(node.outputs) if output is value), len(node.outputs)
        tensor = constant(node.inputs[1]) if len(node.inputs) > 1 else None
        sizes = tensor.numpy().tolist() if tensor is not None else [size // count] * count
        if node.attributes.get_int("axis", 0) in (-1, 2) and sum(sizes) == size:
            return sum(sizes[:number]), sizes[number]
    else:
        tensors = [constant(bound) for bound in node.inputs[1:]]  # First, end, axis and perhaps step.
        numbers = [int(tensor.numpy()[0]) for tensor in tensors if tensor is not None and tensor.size == 1]
        if len(numbers) == len(node.inputs) - 1 and numbers[2] in (-1, 2) and numbers[3:] in ([], [1]):
            return numbers[0], min(numbers[1], size) - numbers[0]
    raise UnsupportedLayerError(f"{node.name} takes a part of numbers in another way")
