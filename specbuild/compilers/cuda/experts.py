"""Reads mixtures of experts: a router, and products by the weights of the experts that a token has chosen."""

from __future__ import annotations

from typing import Any

import onnx_ir as ir

from specbuild.compilers.cpu.fusions import prologue_of
from specbuild.compilers.cuda.nodes import (
    ACTIVATION_OF,
    NORM,
    PRODUCTS,
    UnsupportedLayerError,
    before_views,
    bounds_of_slice,
    other_operand,
    producer,
)
from specbuild.compilers.cuda.tensors import Tensors
from specbuild.graph.scales import constant
from specbuild.weights.packed import as_float32
from specrun.engine_dir.layers import Activation, Linear, Routing


def read_experts(stream: ir.Value, tensors: Tensors) -> tuple[dict[str, Any], ir.Value] | None:
    """The fields of a mixture of experts that reads the stream, and the stream after it; None where there is none."""
    adds = [use.node for use in stream.uses() if use.node.op_type == "Add"]
    if len(adds) != 1 or (total := before_views(other_operand(adds[0], stream))) is None:
        return None
    node = total.producer()
    if node is not None and node.op_type == "Add" and any(_is_sum_of_experts(value) for value in node.inputs):
        raise UnsupportedLayerError("a shared expert beside those that tokens choose")
    if node is None or node.op_type != "Squeeze":
        return None
    weighted = producer(node.inputs[0], "MatMul")
    down, down_bias = _expert_product(weighted.inputs[1], tensors)
    product, gate_up, activation = _gated_by_experts(down, tensors)
    norm = producer(before_views(producer(product.inputs[0], "Unsqueeze").inputs[0]), NORM)
    if norm.inputs[0] is not stream:
        raise UnsupportedLayerError("experts that read something else than the residual stream")
    routing, chosen = _routing(producer(weighted.inputs[0], "Unsqueeze").inputs[0], norm.outputs[0], tensors)
    if chosen not in product.inputs or chosen not in down.inputs:
        raise UnsupportedLayerError("experts that are chosen by something else than the router's highest scores")
    fields = {
        "mlp_norm": tensors.norm(norm),
        "routing": routing,
        "gate_up": gate_up,
        "activation": activation,
        "down": tensors.linear(down, down_bias),
    }
    return fields, adds[0].outputs[0]


def _is_sum_of_experts(value: ir.Value | None) -> bool:
    value = before_views(value)
    node = value.producer() if value is not None else None
    return node is not None and node.op_type == "Squeeze"


def _expert_product(value: ir.Value | None, tensors: Tensors) -> tuple[ir.Node, str | None]:
    """A product by experts, and the name of its biases."""
    node, bias = producer(value, "Add", *PRODUCTS), None
    if node.op_type == "Add":
        chosen = producer(node.inputs[1], "Gather")
        bias = tensors.flat_vector(chosen.inputs[0])
        node = producer(node.inputs[0], *PRODUCTS)
    if "experts" not in node.attributes:
        raise UnsupportedLayerError(f"{node.name}: is no product by experts")
    return node, bias


def _gated_by_experts(down: ir.Node, tensors: Tensors) -> tuple[ir.Node, Linear, Activation]:
    """The product of the gates and of what is gated, its weights, and the activation."""
    if (prologue := prologue_of(down)) is not None and prologue.kind in ACTIVATION_OF:
        parts = [_expert_part(value) for value in (prologue.x, prologue.other)]
        activation = ACTIVATION_OF[prologue.kind]
    elif down.inputs[0] is not None and (gate_and_up := _gpt_oss_gate(down.inputs[0])) is not None:
        parts, activation = [_expert_part(value) for value in gate_and_up], "gpt_oss"
    else:
        raise UnsupportedLayerError("experts without a gate, or with another activation than SiLU, GELU and gpt-oss's")
    (whole, gate_first, step), (other, up_first, other_step) = parts
    product, bias = _expert_product(whole, tensors)
    half = product.attributes["N"].as_ints()[0] // 2
    places = {(0, half, 1): False, (0, 1, 2): True}
    if whole is not other or step != other_step or (gate_first, up_first, step) not in places:
        raise UnsupportedLayerError("a gate that does not lie beside what is gated")
    linear = tensors.linear(product, bias)
    alternates = places[gate_first, up_first, step]
    return product, linear.model_copy(update={"alternates": alternates}), activation


def _expert_part(value: ir.Value) -> tuple[ir.Value | None, int, int]:
    """What a part of a product's outputs is taken from, its first one, and the distance between them."""
    node = producer(value, "Split", "Slice")
    size = producer(node.inputs[0], "Add", *PRODUCTS)
    size = producer(size.inputs[0], *PRODUCTS) if size.op_type == "Add" else size
    bounds = [constant(bound) for bound in node.inputs[1:]] if node.op_type == "Slice" else []
    if len(bounds) == 4 and all(bound is not None and bound.size == 1 for bound in bounds):
        first, _, axis, step = (int(bound.numpy()[0]) for bound in bounds if bound is not None)
        if axis in (-1, 2):
            return node.inputs[0], first, step
    return node.inputs[0], bounds_of_slice(node, value, size.attributes["N"].as_ints()[0])[0], 1


def _routing(shares: ir.Value | None, normalized: ir.Value, tensors: Tensors) -> tuple[Routing, ir.Value]:
    """The router whose shares of the chosen experts a mixture adds up by, and the numbers of these experts."""
    node, is_normalized = producer(shares, "Div", "Softmax", "TopK"), False
    if node.op_type == "Div":  # By their sum.
        is_normalized, total = True, producer(node.inputs[1], "ReduceSum")
        if total.inputs[0] is not node.inputs[0]:
            raise UnsupportedLayerError("shares of experts that are divided by something else than their sum")
        node = producer(node.inputs[0], "TopK")
    if node.op_type == "Softmax":  # Of the highest scores.
        is_normalized, top = True, producer(node.inputs[0], "TopK")
        scores = top.inputs[0]
    else:
        top = node
        scores = producer(top.inputs[0], "Softmax").inputs[0]
    count = constant(top.inputs[1])
    router = producer(scores, "Add", *PRODUCTS)
    bias = None
    if router.op_type == "Add":
        bias, router = tensors.vector(router.inputs[1]), producer(router.inputs[0], *PRODUCTS)
    if count is None or before_views(router.inputs[0]) is not normalized:
        raise UnsupportedLayerError("a router that reads something else than experts do")
    linear = tensors.linear(router, bias)
    chosen = int(count.numpy().reshape(()))
    return Routing(router=linear, chosen=chosen, is_normalized=is_normalized), top.outputs[1]


def _gpt_oss_gate(value: ir.Value) -> tuple[ir.Value, ir.Value] | None:
    """The gate and up of ``(clip(up, -7, 7) + 1) * g * sigmoid(1.702 * g)`` with ``g = min(gate, 7)``, or None."""
    try:
        times = producer(value, "Mul")
        moved, gated = producer(times.inputs[0], "Add"), producer(times.inputs[1], "Mul")
        bounded, sigmoid = producer(gated.inputs[0], "Min"), producer(gated.inputs[1], "Sigmoid")
        sharpened, clipped = producer(sigmoid.inputs[0], "Mul"), producer(moved.inputs[0], "Clip")
    except UnsupportedLayerError:
        return None
    numbers = [moved.inputs[1], bounded.inputs[1], sharpened.inputs[1], *clipped.inputs[1:]]
    tensors = [constant(number) for number in numbers]
    values = [float(as_float32(tensor).reshape(())) for tensor in tensors if tensor is not None and tensor.size == 1]
    is_known = len(values) == 5 and all(abs(a - b) < 0.01 for a, b in zip(values, (1, 7, 1.702, -7, 7), strict=True))
    gate, up = bounded.inputs[0], clipped.inputs[0]
    if not is_known or sharpened.inputs[0] is not gated.inputs[0] or gate is None or up is None:
        return None
    return gate, up
