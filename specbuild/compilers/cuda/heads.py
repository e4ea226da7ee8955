"""Reads what targets and draft heads exchange: the features of tokens, and what a head makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from specbuild.compilers.cpu.attention import writes_features
from specbuild.compilers.cpu.fusions import prologue_of
from specbuild.compilers.cuda.nodes import (
    NORM,
    PRODUCTS,
    UnsupportedLayerError,
    before_views,
    other_operand,
    producer,
)
from specbuild.compilers.cuda.tensors import Tensors
from specbuild.graph.scales import constant
from specrun.engine_dir.contract import LOGITS, past_names
from specrun.engine_dir.layers import Fusion, HeadInput, Linear, Norm

_FEATURES = past_names(0, features=True)[0]


class HeadStart(NamedTuple):
    """What the first layer of a head begins with."""

    part: HeadInput
    stream: ir.Value
    reads: ir.Value
    """What its queries, keys and values are made of."""


def read_fusion(graph: ir.Graph, streams: Sequence[ir.Value], tensors: Tensors) -> Fusion:
    """The features that a target writes. streams: in front of each layer, and behind the last one."""
    value = _written(graph)
    node, linear, norm = producer(value), None, None
    if node.op_type in PRODUCTS:
        linear, value = tensors.linear(node), node.inputs[0]
        if (prologue := prologue_of(node)) is not None:
            norm = tensors.prologue_norm(prologue)
            value = prologue.x
    parts = [value]
    if linear is not None and (joined := producer(value)).op_type == "Concat":
        parts = list(joined.inputs)
    read = [_state(part, streams, tensors) for part in parts]
    return Fusion(layers=[layer for layer, _ in read], norms=[each for _, each in read], norm=norm, linear=linear)


def _state(value: ir.Value | None, streams: Sequence[ir.Value], tensors: Tensors) -> tuple[int, Norm | None]:
    norm = None
    if value not in streams and (node := producer(value)).op_type == NORM:
        norm, value = tensors.norm(node), node.inputs[0]
    if value not in streams:
        raise UnsupportedLayerError("features that are made of something else than residual streams")
    return next(number for number, stream in enumerate(streams) if stream is value), norm


def begin_head(graph: ir.Graph, embedding: ir.Value, tensors: Tensors) -> HeadStart:
    """How a head joins the embedding of a token with the feature before it. Raises UnsupportedLayerError."""
    features = _features(graph)
    norms: list[Norm | None] = []
    joined, normalized = _joined(embedding, features), features
    for value, expected in zip(joined.inputs, (embedding, features), strict=True):
        node = value.producer() if value is not expected and value is not None else None
        if node is not None and node.inputs[0] is not expected:
            raise UnsupportedLayerError("features that are joined in front of embeddings")
        norms.append(tensors.norm(node) if node is not None else None)
        normalized = value if value is not None else normalized
    part = HeadInput(embedding_norm=norms[0], feature_norm=norms[1])
    both = joined.outputs[0]
    product, *others = [use.node for use in both.uses()]
    if others or product.op_type not in PRODUCTS or prologue_of(product) is not None:
        raise UnsupportedLayerError("embeddings and features that another node reads than a product")
    if len(product.outputs) > 1:
        adds_normalized = normalized is not features and len(normalized.uses()) > 1
        stream = normalized if adds_normalized else features
        return HeadStart(part.model_copy(update={"adds_normalized": adds_normalized}), stream, both)
    stream, bias = product.outputs[0], None
    readers = [use.node for use in stream.uses()]
    if len(readers) == 1 and readers[0].op_type == "Add":
        bias, stream = tensors.vector(other_operand(readers[0], stream)), readers[0].outputs[0]
    linear: Linear = tensors.linear(product, bias)
    return HeadStart(part.model_copy(update={"linear": linear}), stream, stream)


def read_head_output(
    graph: ir.Graph, stream: ir.Value, part: HeadInput, tensors: Tensors
) -> tuple[Norm | None, Linear, HeadInput]:
    """The last norm, the output layer, and what a head keeps of itself. Raises UnsupportedLayerError."""
    logits = next(value for value in graph.outputs if value.name == LOGITS)
    node = producer(logits)
    if node.op_type == "Gather":  # Of the logits of fewer tokens, and of one that is behind them all.
        numbers = before_views(node.inputs[1])
        node = producer(producer(node.inputs[0], "Concat").inputs[0], *PRODUCTS)
        if numbers is None or (tensor := constant(numbers)) is None:
            raise UnsupportedLayerError("a head's vocabulary that is no constant")
        tensors.numbers["head.vocab_numbers"] = tensor.numpy().reshape(-1).astype(np.int32)
        part = part.model_copy(update={"vocab_numbers": "head.vocab_numbers"})
    if node.op_type not in PRODUCTS:
        raise UnsupportedLayerError(f"{node.name}: logits that no product gives")
    norm = tensors.prologue_norm(prologue_of(node))
    kept, keeps_normalized = producer(_written(graph)), False
    if kept.op_type == NORM:
        keeps_normalized = norm is not None and _is_same(tensors.norm(kept), norm, tensors)
        kept = producer(kept.inputs[0])
        if not keeps_normalized:
            raise UnsupportedLayerError("a head whose feature has a norm of its own")
    wanted = producer(node.inputs[0], "GatherElements", "GatherND")
    if kept.op_type != "Slice" or wanted.outputs[0] is not kept.inputs[0]:
        raise UnsupportedLayerError("a head whose feature is not what its output layer reads")
    if wanted.inputs[0] is not stream:
        last = producer(wanted.inputs[0], NORM)
        if last.inputs[0] is not stream or norm is not None:
            raise UnsupportedLayerError("between the last layer and the head is more than a norm")
        norm, keeps_normalized = tensors.norm(last), True
    return norm, tensors.linear(node), part.model_copy(update={"keeps_normalized": keeps_normalized})


def _written(graph: ir.Graph) -> ir.Value | None:
    """The features that a graph writes."""
    nodes = [node for node in graph if writes_features(node)]
    if len(nodes) != 1:
        raise UnsupportedLayerError("no features, or several")
    return producer(before_views(nodes[0].inputs[1]), "Unsqueeze").inputs[0]


def _features(graph: ir.Graph) -> ir.Value:
    """The feature of the token before each one."""
    value = next(value for value in graph.inputs if value.name == _FEATURES)
    for use in value.uses():
        if use.node.op_type == "GatherElements":
            for reader in use.node.outputs[0].uses():
                if reader.node.op_type == "Gather":
                    widened = [other.node for other in reader.node.outputs[0].uses() if other.node.op_type == "Cast"]
                    return widened[0].outputs[0] if widened else reader.node.outputs[0]
    raise UnsupportedLayerError("a head that does not read the features of tokens one by one")


def _joined(embedding: ir.Value, features: ir.Value) -> ir.Node:
    """What joins both, perhaps normalized."""

    def reached(value: ir.Value) -> list[ir.Node]:
        nodes = [use.node for use in value.uses()]
        return nodes + [use.node for node in nodes if node.op_type == NORM for use in node.outputs[0].uses()]

    joined = [node for node in reached(embedding) if node.op_type == "Concat" and node in reached(features)]
    if len(joined) != 1 or len(joined[0].inputs) != 2:
        raise UnsupportedLayerError("embeddings and features that are not joined")
    return joined[0]


def _is_same(norm: Norm, other: Norm, tensors: Tensors) -> bool:
    factors, others = (tensors.vectors[each.weight] for each in (norm, other))
    return norm.epsilon == other.epsilon and np.array_equal(factors, others)
