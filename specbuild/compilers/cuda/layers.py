"""Reads the layers of a dense decoder from the graph of CPU engines: products, attention, residual sums.

It checks each node, so that the graph computes exactly what ``Decoder`` describes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import numpy as np
import onnx_ir as ir

from specbuild.compilers.cpu.attention import OPERATOR as ATTENTION
from specbuild.compilers.cpu.fusions import GELU_GATED, NORMALIZED, SILU_GATED, prologue_of, residual_of
from specbuild.compilers.cuda.tiles import pack_table
from specbuild.graph.scales import constant
from specbuild.weights.packed import Floats, as_float32
from specrun.engine_dir.contract import INPUT_IDS, LOGITS, past_names
from specrun.engine_dir.layers import Activation, Attention, Bits, Group, Layer, Linear, Norm, TensorType

_PRODUCTS, _LOOKUP = ("FloatMatMul", "QuantizedMatMul"), "EmbeddingLookup"
_ACTIVATIONS: dict[int, Activation] = {SILU_GATED: "silu", GELU_GATED: "gelu_tanh"}


class UnsupportedLayerError(Exception):
    """A graph that is no dense decoder, or one that the kernels do not support."""


@dataclass
class Tensors:
    """The tensors of the layers, by name."""

    weights: dict[str, ir.TensorProtocol] = field(default_factory=dict)
    """Weights of linear layers in tiles, their scales, units and offsets: computed when they are read."""
    vectors: dict[str, Floats] = field(default_factory=dict)
    """Factors of norms, biases, cosines and sines."""

    def described(self) -> Iterator[tuple[str, tuple[int, ...], TensorType]]:
        """Name, shape and type of each, without reading weights."""
        for name, weight in self.weights.items():
            yield name, tuple(weight.shape.numpy()), cast(TensorType, weight.dtype.numpy().name)
        for name, vector in self.vectors.items():
            yield name, vector.shape, "float32"

    def weight(self, value: ir.Value | None) -> str:
        """Add a weight, or its scales, units or offsets. Returns its name."""
        if value is None or value.const_value is None:
            raise UnsupportedLayerError("a weight that is no constant")
        self.weights[str(value.name)] = value.const_value
        return str(value.name)

    def vector(self, value: ir.Value | None) -> str:
        """Add constants, perhaps behind a Cast. Returns their name."""
        if value is None or (tensor := constant(value)) is None:
            raise UnsupportedLayerError("numbers that are no constants")
        self.vectors[str(value.name)] = as_float32(tensor)
        return str(value.name)

    def norm(self, node: ir.Node) -> Norm:
        """An RMS norm."""
        if node.attributes.get_int("axis", -1) != -1:
            raise UnsupportedLayerError("a norm over several axes")
        return Norm(weight=self.vector(node.inputs[1]), epsilon=node.attributes.get_float("epsilon", 1e-5))

    def input_norm(self, product: ir.Node, stream: ir.Value) -> Norm | None:
        """The norm with which a product reads the residual stream; None: it reads it as it is."""
        prologue = prologue_of(product)
        if product.inputs[0] is not stream or (prologue and prologue.kind != NORMALIZED):
            raise UnsupportedLayerError(f"{product.name} reads something else than the residual stream")
        return Norm(weight=self.vector(prologue.other), epsilon=prologue.epsilon) if prologue else None

    def linear(self, node: ir.Node, bias: str | None = None) -> Linear:
        """The weight of a product, with all of its outputs, or of a lookup."""
        values = node.inputs[2:] if node.op_type == _LOOKUP else [*node.inputs[2:3], *node.inputs[6:8]]
        scaling = dict(zip(("scales", "units", "offsets"), values, strict=False))
        bits = cast(Bits, node.attributes["bits"].as_int())
        group = cast(Group, node.attributes.get_int("group", 32))
        return Linear(
            weight=self.weight(node.inputs[1]),
            inputs=node.attributes["K"].as_int(),
            outputs=sum(node.attributes["N"].as_ints()),
            bits=bits,
            has_floats=bool(node.attributes.get_int("has_floats", 0)),
            group=group,
            bias=bias,
            **{name: self.weight(value) for name, value in scaling.items() if bits < 16 and value is not None},
        )

    def joined_bias(self, parts: Iterable[_Part], name: str) -> str | None:
        """Join the biases of parts. Returns their name; None without biases."""
        biases = [part.bias for part in parts]
        if all(bias is None for bias in biases):
            return None
        rows = [np.zeros(part.size, np.float32) if part.bias is None else part.bias for part in parts]
        self.vectors[name] = np.concatenate(rows)
        return name


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
    lookups = [use.node for use in ids.uses() if use.node.op_type in ("Gather", _LOOKUP)]
    if len(lookups) != 1:
        raise UnsupportedLayerError("token ids are looked up in several tables, or in none")
    lookup, stream = lookups[0], lookups[0].outputs[0]
    table = tensors.linear(lookup) if lookup.op_type == _LOOKUP else _table(lookup, tensors, dtype)
    if (widen := _only_reader(stream, "Cast")) is not None:
        stream = widen.outputs[0]
    scale = 1.0
    if (times := _only_reader(stream, "Mul")) is not None:
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


def read_layers(graph: ir.Graph, stream: ir.Value, num_layers: int, tensors: Tensors) -> tuple[list[Layer], ir.Value]:
    """All layers, and the residual stream after them. Raises UnsupportedLayerError, which names the layer."""
    attention = {
        node.inputs[3].name: node for node in graph if node.op_type == ATTENTION and node.inputs[3] is not None
    }
    layers = []
    for number in range(num_layers):
        try:
            if (node := attention.get(past_names(number + 1)[-2])) is None:
                raise UnsupportedLayerError("attention that the kernels do not compute")
            layer, stream = _layer(node, stream, tensors)
        except UnsupportedLayerError as error:
            raise UnsupportedLayerError(f"layer {number}: {error}") from error
        layers.append(layer)
    return layers, stream


def read_head(graph: ir.Graph, stream: ir.Value, tensors: Tensors) -> tuple[Norm | None, Linear, float]:
    """The last norm, the head, and the bound of logits, 0 without one. Raises UnsupportedLayerError."""
    value = next(value for value in graph.outputs if value.name == LOGITS)
    node, softcap = _producer(value, "Cast", "Mul", *_PRODUCTS), 0.0
    if node.op_type == "Cast":
        node = _producer(node.inputs[0], "Mul", *_PRODUCTS)
    if node.op_type == "Mul":  # cap * tanh(x / cap)
        times, tanh = constant(node.inputs[1]), _producer(node.inputs[0], "Tanh")
        divided = _producer(tanh.inputs[0], "Div")
        divisor = constant(divided.inputs[1])
        if (
            times is None
            or divisor is None
            or times.size != 1
            or float(as_float32(times)) != float(as_float32(divisor))
        ):
            raise UnsupportedLayerError("logits that are not those of the head")
        softcap, node = float(as_float32(times)), _producer(divided.inputs[0], *_PRODUCTS)
    gather = _producer(node.inputs[0], "GatherND")
    if gather.inputs[0] is not stream:
        raise UnsupportedLayerError("between the last layer and the head is more than a norm")
    return tensors.input_norm(node, gather.outputs[0]), tensors.linear(node), softcap


def _layer(node: ir.Node, stream: ir.Value, tensors: Tensors) -> tuple[Layer, ir.Value]:
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
    input_norm = tensors.input_norm(product, stream)
    heads = tensors.linear(product, tensors.joined_bias(parts, f"{product.name}.bias"))
    attention = _attention(node, parts[0].norm, parts[1].norm, tensors)
    attended = _behind_views(node.outputs[0])
    output, output_norm, stream = _added(attended, stream, tensors)
    gate, up, activation, down = _gated(stream)
    mlp_norm = tensors.input_norm(gate.product, stream)
    if gate.product is not up.product or (gate.first, up.first) != (0, gate.size):
        raise UnsupportedLayerError("a gate that does not lie beside what is gated")
    if gate.bias is not None or up.bias is not None:
        raise UnsupportedLayerError("a gate with a bias")
    projected, down_norm, stream = _added_of(down, stream, tensors)
    layer = Layer(
        input_norm=input_norm,
        heads=heads,
        attention=attention,
        output=output,
        output_norm=output_norm,
        mlp_norm=mlp_norm,
        gate_up=tensors.linear(gate.product),
        activation=activation,
        down=projected,
        down_norm=down_norm,
    )
    return layer, stream


def _attention(node: ir.Node, query_norm: Norm | None, key_norm: Norm | None, tensors: Tensors) -> Attention:
    cos, sin, sinks = (*node.inputs[6:], None, None, None)[:3]
    if sinks is not None:
        raise UnsupportedLayerError("attention sinks")
    if node.attributes.get_int("chunk", 0):
        raise UnsupportedLayerError("attention in chunks")
    if any(table is not None and table.const_value is None for table in (cos, sin)):
        raise UnsupportedLayerError("a rotation that depends on more than positions")
    if query_norm and key_norm and query_norm.epsilon != key_norm.epsilon:
        raise UnsupportedLayerError("norms of queries and keys that differ in epsilon")
    attributes = node.attributes
    return Attention(
        window=attributes.get_int("window", 0),
        scale=attributes.get_float("scale", 0.0),
        softcap=attributes.get_float("softcap", 0.0),
        rotated=attributes.get_int("rotated", 0),
        interleaved=bool(attributes.get_int("interleaved", 0)),
        cos=tensors.vector(cos) if cos is not None else None,
        sin=tensors.vector(sin) if sin is not None else None,
        query_norm=query_norm,
        key_norm=key_norm,
    )


def _head_part(value: ir.Value | None, tensors: Tensors) -> _Part:
    """Queries, keys or values: outputs of a product, with a bias and a norm of each head."""
    value = _before_views(value)
    norm = None
    if (node := _producer(value)).op_type == "RMSNormalization":
        norm = tensors.norm(node)
        value = _before_views(node.inputs[0])
    return _part(value)._replace(norm=norm)


def _part(value: ir.Value | None) -> _Part:
    """Outputs of a product, perhaps with a bias, perhaps a slice of a wider one."""
    node = _producer(value, *_PRODUCTS, "Add", "Slice", "Split")
    if node.op_type in _PRODUCTS:
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
    first, size = _slice(node, value, part.size)
    bias = part.bias[first : first + size] if part.bias is not None else None
    return _Part(part.product, part.first + first, size, bias)


def _slice(node: ir.Node, value: ir.Value | None, size: int) -> tuple[int, int]:
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


def _gated(stream: ir.Value) -> tuple[_Part, _Part, Activation, ir.Node]:
    """The gate, the up projection, the activation and the down projection of an MLP that reads the stream."""
    for product in [use.node for use in stream.uses() if use.node.op_type in _PRODUCTS and use.idx == 0]:
        for output in product.outputs:
            uses = [use.node for use in output.uses()]
            for down in [reader for node in uses for reader in (node, *_readers(node))]:
                prologue = prologue_of(down)
                if prologue and prologue.kind in _ACTIVATIONS:
                    return _part(prologue.x), _part(prologue.other), _ACTIVATIONS[prologue.kind], down
    raise UnsupportedLayerError("an MLP without a gate, or with another activation than SiLU and GELU by tanh")


def _added(attended: ir.Value, stream: ir.Value, tensors: Tensors) -> tuple[Linear, Norm | None, ir.Value]:
    products = [use.node for use in attended.uses()]
    if len(products) != 1 or products[0].op_type not in _PRODUCTS or prologue_of(products[0]) is not None:
        raise UnsupportedLayerError("attention that is not projected by a linear layer")
    return _added_of(products[0], stream, tensors)


def _added_of(product: ir.Node, stream: ir.Value, tensors: Tensors) -> tuple[Linear, Norm | None, ir.Value]:
    """A linear layer, the norm of its outputs, and the residual stream after they are added."""
    value, norm, bias = product.outputs[0], None, None
    if residual_of(product) is stream:
        return tensors.linear(product), None, value
    if (add := _only_reader(value, "Add")) is not None and (numbers := _other(add, value)) is not stream:
        bias, value = tensors.vector(numbers), add.outputs[0]
    if (node := _only_reader(value, "RMSNormalization")) is not None:
        norm, value = tensors.norm(node), node.outputs[0]
    add = _only_reader(value, "Add")
    if add is None or _other(add, value) is not stream:
        raise UnsupportedLayerError(f"{product.name}: what it gives is not added to the residual stream as it is")
    return tensors.linear(product, bias), norm, add.outputs[0]


def _other(node: ir.Node, value: ir.Value) -> ir.Value | None:
    """The second operand of a sum."""
    return node.inputs[1] if node.inputs[0] is value else node.inputs[0]


def _readers(node: ir.Node) -> list[ir.Node]:
    return [use.node for output in node.outputs for use in output.uses()]


def _only_reader(value: ir.Value, kind: str) -> ir.Node | None:
    """The only node that reads a value, where it is of a kind."""
    readers = [use.node for use in value.uses()]
    return readers[0] if len(readers) == 1 and readers[0].op_type == kind else None


def _producer(value: ir.Value | None, *kinds: str) -> ir.Node:
    node = value.producer() if value is not None else None
    if node is None or (kinds and node.op_type not in kinds):
        got = node.op_type if node is not None else "an input"
        raise UnsupportedLayerError(f"{value.name if value is not None else 'nothing'} comes from {got}")
    return node


def _before_views(value: ir.Value | None) -> ir.Value | None:
    while value is not None and (node := value.producer()) is not None and node.op_type == "Reshape":
        value = node.inputs[0]
    return value


def _behind_views(value: ir.Value) -> ir.Value:
    while (view := _only_reader(value, "Reshape")) is not None:
        value = view.outputs[0]
    return value
