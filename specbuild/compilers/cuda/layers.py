"""Reads the layers of a decoder from the graph of CPU engines: products, attention, experts, residual sums.

It checks each node, so that the graph computes exactly what ``Decoder`` describes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from specbuild.compilers.cpu.attention import OPERATOR as ATTENTION
from specbuild.compilers.cpu.fusions import prologue_of, residual_of
from specbuild.compilers.cuda.experts import read_experts
from specbuild.compilers.cuda.nodes import (
    ACTIVATION_OF,
    LOOKUP,
    NORM,
    PRODUCTS,
    UnsupportedLayerError,
    before_views,
    behind_views,
    bounds_of_slice,
    only_reader,
    other_operand,
    producer,
    readers,
)
from specbuild.compilers.cuda.tensors import Tensors
from specbuild.compilers.cuda.tiles import pack_table
from specbuild.graph.scales import constant
from specbuild.weights.packed import Floats, as_float32
from specrun.engine_dir.contract import INPUT_IDS, LOGITS, past_names
from specrun.engine_dir.layers import Activation, Attention, Layer, Linear, Norm


class _Part(NamedTuple):
    """Some outputs of a product."""

    product: ir.Node
    first: int
    size: int
    bias: Floats | None = None
    norm: Norm | None = None
    """Norm of its heads; None without one."""


class Embedding(NamedTuple):
    """The embedding, with which the residual stream begins."""

    stream: ir.Value
    table: Linear
    scale: float


def read_embedding(graph: ir.Graph, tensors: Tensors, dtype: ir.DataType) -> Embedding:
    """The embedding of a graph, whose table may be the head's. Raises UnsupportedLayerError."""
    ids = next(value for value in graph.inputs if value.name == INPUT_IDS)
    lookups = [use.node for use in ids.uses() if use.node.op_type in ("Gather", LOOKUP)]
    if len(lookups) != 1:
        raise UnsupportedLayerError("token ids are looked up in several tables, or in none")
    lookup, stream = lookups[0], lookups[0].outputs[0]
    table = tensors.linear(lookup) if lookup.op_type == LOOKUP else _table(lookup, tensors, dtype)
    if (widen := only_reader(stream, "Cast")) is not None:
        stream = widen.outputs[0]
    scale = 1.0
    if (times := only_reader(stream, "Mul")) is not None:
        factor = constant(times.inputs[0]) or constant(times.inputs[1])
        if factor is None or factor.size != 1:
            raise UnsupportedLayerError("an embedding with more than a factor")
        scale, stream = float(as_float32(factor).reshape(())), times.outputs[0]
    return Embedding(stream, table, scale)


def _table(lookup: ir.Node, tensors: Tensors, dtype: ir.DataType) -> Linear:
    numbers, value = constant(lookup.inputs[0]), lookup.inputs[0]
    if numbers is None or value is None or len(numbers.shape) != 2:
        raise UnsupportedLayerError("an embedding that is no table")
    tensors.weights[str(value.name)] = pack_table(numbers, dtype)
    rows, width = (int(size) for size in numbers.shape.numpy())
    return Linear(weight=str(value.name), inputs=width, outputs=rows)


def read_layers(
    graph: ir.Graph, stream: ir.Value, reads: ir.Value, num_layers: int, tensors: Tensors
) -> tuple[list[Layer], list[ir.Value]]:
    """All layers, and the residual streams in front of each and behind the last.

    reads: what the first one's queries, keys and values are made of: the stream, or with a head more. Raises
    UnsupportedLayerError, which names the layer.
    """
    attention = {
        node.inputs[3].name: node for node in graph if node.op_type == ATTENTION and node.inputs[3] is not None
    }
    layers, streams = list[Layer](), [stream]
    for number in range(num_layers):
        try:
            if (node := attention.get(past_names(number + 1)[-2])) is None:
                raise UnsupportedLayerError("attention that the kernels do not compute")
            layer, stream = _layer(node, stream, stream if number else reads, tensors)
        except UnsupportedLayerError as error:
            raise UnsupportedLayerError(f"layer {number}: {error}") from error
        layers.append(layer)
        streams.append(stream)
    return layers, streams


def read_head(graph: ir.Graph, stream: ir.Value, tensors: Tensors) -> tuple[Norm | None, Linear, float]:
    """The last norm, the head, and the bound of logits, 0 without one. Raises UnsupportedLayerError."""
    value = next(value for value in graph.outputs if value.name == LOGITS)
    node, softcap = producer(value, "Cast", "Mul", *PRODUCTS), 0.0
    if node.op_type == "Cast":
        node = producer(node.inputs[0], "Mul", *PRODUCTS)
    if node.op_type == "Mul":  # cap * tanh(x / cap)
        times, tanh = constant(node.inputs[1]), producer(node.inputs[0], "Tanh")
        divided = producer(tanh.inputs[0], "Div")
        divisor = constant(divided.inputs[1])
        if (
            times is None
            or divisor is None
            or times.size != 1
            or float(as_float32(times)) != float(as_float32(divisor))
        ):
            raise UnsupportedLayerError("logits that are not those of the head")
        softcap, node = float(as_float32(times)), producer(divided.inputs[0], *PRODUCTS)
    gather = producer(node.inputs[0], "GatherND")
    norm = tensors.input_norm(node, gather.outputs[0])
    if gather.inputs[0] is not stream:  # The features of a draft head are normalized, too.
        last = producer(gather.inputs[0])
        if norm is not None or last.op_type != NORM or last.inputs[0] is not stream:
            raise UnsupportedLayerError("between the last layer and the head is more than a norm")
        norm = tensors.norm(last)
    return norm, tensors.linear(node), softcap


def _layer(node: ir.Node, stream: ir.Value, reads: ir.Value, tensors: Tensors) -> tuple[Layer, ir.Value]:
    parts = [_head_part(value, tensors) for value in node.inputs[:3]]
    product = parts[0].product
    bounds = np.cumsum([0, *(part.size for part in parts)]).tolist()
    if any(part.product is not product for part in parts) or [part.first for part in parts] != bounds[:3]:
        raise UnsupportedLayerError("queries, keys and values that do not lie side by side")
    if parts[2].norm is not None:
        raise UnsupportedLayerError("values that are normalized")
    cache = node.inputs[3]
    assert cache is not None and cache.shape is not None
    if any(part.norm and len(tensors.vectors[part.norm.weight]) != cache.shape[3] for part in parts):
        raise UnsupportedLayerError("queries or keys with a norm over all heads")
    input_norm = tensors.input_norm(product, reads)
    heads = tensors.linear(product, _joined_bias(parts, f"{product.name}.bias", tensors))
    attention = _attention(node, parts[0].norm, parts[1].norm, tensors)
    attended = behind_views(node.outputs[0])
    output, output_norm, stream = _added(attended, stream, tensors)
    mlp, stream = read_experts(stream, tensors) or _mlp(stream, tensors)
    layer = Layer(
        input_norm=input_norm, heads=heads, attention=attention, output=output, output_norm=output_norm, **mlp
    )
    return layer, stream


def _mlp(stream: ir.Value, tensors: Tensors) -> tuple[dict[str, Any], ir.Value]:
    """The fields of a dense MLP that reads the stream, and the stream after it."""
    gate, up, activation, down = _gated(stream)
    mlp_norm = tensors.input_norm(gate.product, stream)
    if gate.product is not up.product or (gate.first, up.first) != (0, gate.size):
        raise UnsupportedLayerError("a gate that does not lie beside what is gated")
    if gate.bias is not None or up.bias is not None:
        raise UnsupportedLayerError("a gate with a bias")
    projected, down_norm, stream = _added_of(down, stream, tensors)
    fields = {"mlp_norm": mlp_norm, "gate_up": tensors.linear(gate.product), "activation": activation}
    return fields | {"down": projected, "down_norm": down_norm}, stream


def _attention(node: ir.Node, query_norm: Norm | None, key_norm: Norm | None, tensors: Tensors) -> Attention:
    cos, sin, sinks = (*node.inputs[6:], None, None, None)[:3]
    if node.attributes.get_int("chunk", 0):
        raise UnsupportedLayerError("attention in chunks")
    if any(table is not None and table.const_value is None for table in (cos, sin)):
        raise UnsupportedLayerError("a rotation that depends on more than positions")
    if query_norm and key_norm and query_norm.epsilon != key_norm.epsilon:
        raise UnsupportedLayerError("norms of queries and keys that differ in epsilon")
    attributes = node.attributes
    return Attention(
        window=attributes.get_int("window", 0),
        first_key=attributes.get_int("first_key", 0),
        scale=attributes.get_float("scale", 0.0),
        softcap=attributes.get_float("softcap", 0.0),
        rotated=attributes.get_int("rotated", 0),
        interleaved=bool(attributes.get_int("interleaved", 0)),
        cos=tensors.vector(cos) if cos is not None else None,
        sin=tensors.vector(sin) if sin is not None else None,
        query_norm=query_norm,
        key_norm=key_norm,
        sinks=tensors.flat_vector(sinks) if sinks is not None else None,
    )


def _head_part(value: ir.Value | None, tensors: Tensors) -> _Part:
    """Queries, keys or values: outputs of a product, with a bias and a norm of each head."""
    value = before_views(value)
    norm = None
    if (node := producer(value)).op_type == NORM:
        norm = tensors.norm(node)
        value = before_views(node.inputs[0])
    return _part(value)._replace(norm=norm)


def _joined_bias(parts: Iterable[_Part], name: str, tensors: Tensors) -> str | None:
    """Join the biases of parts. Returns their name; None without biases."""
    biases = [part.bias for part in parts]
    if all(bias is None for bias in biases):
        return None
    rows = [np.zeros(part.size, np.float32) if part.bias is None else part.bias for part in parts]
    tensors.vectors[name] = np.concatenate(rows)
    return name


def _part(value: ir.Value | None) -> _Part:
    """Outputs of a product, perhaps with a bias, perhaps a slice of a wider one."""
    node = producer(value, *PRODUCTS, "Add", "Slice", "Split")
    if node.op_type in PRODUCTS:
        sizes = list(node.attributes["N"].as_ints())
        number = next(number for number, output in enumerate(node.outputs) if output is value)
        return _Part(node, sum(sizes[:number]), sizes[number])
    if node.op_type == "Add":
        numbers, whole = constant(node.inputs[1]), node.inputs[0]
        if numbers is None:
            numbers, whole = constant(node.inputs[0]), node.inputs[1]
        part = _part(whole)
        if numbers is None or part.bias is not None or numbers.size != part.size:
            raise UnsupportedLayerError(f"{node.name} adds more than a bias")
        return part._replace(bias=as_float32(numbers).reshape(-1))
    part = _part(node.inputs[0])
    first, size = bounds_of_slice(node, value, part.size)
    bias = part.bias[first : first + size] if part.bias is not None else None
    return _Part(part.product, part.first + first, size, bias)


def _gated(stream: ir.Value) -> tuple[_Part, _Part, Activation, ir.Node]:
    """The gate, the up projection, the activation and the down projection of an MLP that reads the stream."""
    for product in [use.node for use in stream.uses() if use.node.op_type in PRODUCTS and use.idx == 0]:
        for output in product.outputs:
            uses = [use.node for use in output.uses()]
            for down in [reader for node in uses for reader in (node, *readers(node))]:
                prologue = prologue_of(down)
                if prologue and prologue.kind in ACTIVATION_OF:
                    return _part(prologue.x), _part(prologue.other), ACTIVATION_OF[prologue.kind], down
    raise UnsupportedLayerError("an MLP without a gate, or with another activation than SiLU and GELU by tanh")


def _added(attended: ir.Value, stream: ir.Value, tensors: Tensors) -> tuple[Linear, Norm | None, ir.Value]:
    products = [use.node for use in attended.uses()]
    if len(products) != 1 or products[0].op_type not in PRODUCTS or prologue_of(products[0]) is not None:
        raise UnsupportedLayerError("attention that is not projected by a linear layer")
    return _added_of(products[0], stream, tensors)


def _added_of(product: ir.Node, stream: ir.Value, tensors: Tensors) -> tuple[Linear, Norm | None, ir.Value]:
    """A linear layer, the norm of its outputs, and the residual stream after they are added."""
    value, norm, bias = product.outputs[0], None, None
    if residual_of(product) is stream:
        return tensors.linear(product), None, value
    if (add := only_reader(value, "Add")) is not None and (numbers := other_operand(add, value)) is not stream:
        bias, value = tensors.vector(numbers), add.outputs[0]
    if (node := only_reader(value, NORM)) is not None:
        norm, value = tensors.norm(node), node.outputs[0]
    add = only_reader(value, "Add")
    if add is None or other_operand(add, value) is not stream:
        raise UnsupportedLayerError(f"{product.name}: what it gives is not added to the residual stream as it is")
    return tensors.linear(product, bias), norm, add.outputs[0]
