"""Quantized weights in the graph, as standard ONNX: DequantizeLinear in front of the linear layer, [K, N].

This is the form that ONNX Runtime makes MatMulNBits of, and that TensorRT keeps packed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from specbuild.graph import ops as graphs
from specbuild.weights.packed import Packed, Stack, block_sums, of_channels, shared_activation
from specbuild.weights.packed_model import PackedModel

_CODES = {"int8": ir.DataType.INT8, "float8": ir.DataType.FLOAT8E4M3FN}
"""The type of an input's codes."""

_TABLE = ".embedding"
"""Suffix of the names of a quantized embedding's tensors, which a head that is tied to it reads too."""


class WeightedMatMul(NamedTuple):
    """A product of activations with a weight."""

    node: ir.Node
    weight: ir.Value
    transposed: bool
    """The weight is [N, K], as torch's Linear keeps it, not [K, N]."""


def weighted_matmuls(model: ir.Model, axes: int = 2) -> list[WeightedMatMul]:
    """The products whose weight is an initializer with so many dimensions, in the order of the graph."""
    matmuls = []
    for node in model.graph:
        if node.op_type != "MatMul":
            continue
        factor = node.inputs[1]
        producer = factor.producer() if factor is not None else None
        transpose = producer if producer is not None and producer.op_type == "Transpose" else None
        weight = transpose.inputs[0] if transpose is not None else factor
        if weight is not None and weight.is_initializer() and weight.shape is not None and len(weight.shape) == axes:
            matmuls.append(WeightedMatMul(node, weight, transpose is not None))
    return matmuls


def attach(model: ir.Model, packed: PackedModel, prefix: str) -> None:
    """Put quantized weights into ``model``, as the exporter leaves it, in place of the dense ones.

    prefix: what the exporter puts in front of parameters' names.
    """
    # Found before anything changes: a tied weight vanishes with its last reader.
    lookups = [node for node in model.graph if node.op_type == "Gather"]
    for product in weighted_matmuls(model):
        if weight := packed.linears.get(str(product.weight.name).removeprefix(prefix)):
            quantize_matmul(model, product, weight)
    for product in weighted_matmuls(model, axes=3):
        if experts := packed.experts.get(str(product.weight.name).removeprefix(prefix)):
            quantize_experts(model, product, experts)
    for node in lookups:
        table = node.inputs[0]
        if table is not None and (rows := packed.tables.get(str(table.name).removeprefix(prefix))):
            quantize_embedding(model, node, rows)


def quantize_matmul(model: ir.Model, product: WeightedMatMul, packed: Packed) -> None:
    """Let ``product`` multiply by ``packed``, perhaps a table. The dense weight goes where nothing else reads it."""
    node, is_table = product.node, packed.axis == 0
    build = _Builder(model.graph, node, f"{product.weight.name}{_TABLE if is_table else ''}", product.weight.dtype)
    x = graphs.input_of(node, 0)
    if packed.input_factors is not None:
        x = build.node("Mul", x, build.constant("input_factors", packed.input_factors))
    if packed.channel_order is not None:
        x = build.node("Gather", x, build.constant("channel_order", packed.channel_order), axis=-1)
    weight = build.dequantized(packed)
    if is_table:
        weight = build.node("Transpose", weight, perm=[1, 0])
    build.replace(_product(build, x, weight, packed))
    _drop_unused(model.graph, product.weight)


def quantize_experts(model: ir.Model, product: WeightedMatMul, experts: Sequence[Packed]) -> None:
    """Let ``product``, whose weight [E, K, N] or [E, N, K] holds stacked experts, multiply by ``experts``."""
    build = _Builder(model.graph, product.node, str(product.weight.name), product.weight.dtype)
    form = replace(experts[0], activation=shared_activation(experts))
    build.replace(_product(build, graphs.input_of(product.node, 0), build.dequantized_experts(experts), form))
    _drop_unused(model.graph, product.weight)


def _product(build: _Builder, x: ir.Value, weight: ir.Value, packed: Packed) -> ir.Value:
    """``x`` times ``weight``, with the input rounded as ``packed`` says, and its offsets.

    What has no standard ONNX form, or one that only TensorRT wants, travels as metadata of the product.
    """
    metadata, activation = dict(build.old.metadata_props), packed.activation
    if activation is not None and activation.form == "float4":
        metadata[graphs.FLOAT4_INPUT] = repr(activation.scale)
    elif activation is not None and activation.scale is None:
        metadata[graphs.TOKEN_INPUT] = activation.form
    elif activation is not None:  # With a scale that a calibration fixed.
        codes = _CODES[activation.form]
        zero = build.tensor(f"quantization.zero_{activation.form}", ir.tensor(np.zeros((), codes.numpy()), dtype=codes))
        steps = build.constant("activation_scale", activation.scale)
        x = build.node("DequantizeLinear", build.node("QuantizeLinear", x, steps, zero, dtype=codes), steps, zero)
    y = build.node("MatMul", x, weight)
    build.nodes[-1].metadata_props.update(metadata)
    if packed.offsets is None:
        return y
    sums, offsets = build.node("MatMul", x, build.block_sums(packed)), build.offsets(packed)
    offsets = build.node("Transpose", offsets, perm=[1, 0]) if packed.axis == 0 else offsets
    return build.node("Add", y, build.node("MatMul", sums, offsets))


def quantize_embedding(model: ir.Model, gather: ir.Node, packed: Packed) -> None:
    """Let ``gather`` look rows of ``packed`` up, whose codes are [V, H]."""
    weight = graphs.input_of(gather, 0)
    build = _Builder(model.graph, gather, f"{weight.name}{_TABLE}", weight.dtype)
    table, ids = build.dequantized(packed), gather.inputs[1]
    if packed.offsets is None or ids is None:
        gather.replace_input_with(0, table)
        build.insert()
    else:
        spread = build.block_sums(packed, turned=True)
        offsets = build.node("MatMul", build.node("Gather", build.offsets(packed), ids), spread)
        build.replace(build.node("Add", build.node("Gather", table, ids), offsets))
    _drop_unused(model.graph, weight)


class _Builder:
    """Makes nodes that take the place of one node, or stand in front of it."""

    def __init__(self, graph: ir.Graph, old: ir.Node, name: str, dtype: ir.DataType | None) -> None:
        assert dtype is not None
        self.graph, self.old, self.name, self.dtype = graph, old, name, dtype
        self.nodes: list[ir.Node] = []

    def node(self, op_type: str, *inputs: ir.Value, dtype: ir.DataType | None = None, **attributes: Any) -> ir.Value:
        new_node = ir.node(op_type, inputs, attributes, name=f"{self.old.name}.{self.name}.{len(self.nodes)}.{op_type}")
        value = new_node.outputs[0]
        value.name, value.dtype = new_node.name, dtype or self.dtype
        self.nodes.append(new_node)
        return value

    def dequantized(self, packed: Packed) -> ir.Value:
        """The packed weight behind DequantizeLinear, in the graph's dtype."""
        scales = self._times_units("scale", packed.scales, packed.scale_units, packed.axis)
        inputs = [self.initializer("codes", packed.codes), scales]
        if packed.zero_points is not None:
            inputs.append(self.initializer("zero_points", packed.zero_points))
        attributes: dict[str, Any] = {"axis": packed.axis}
        if packed.block is not None:
            attributes = {"axis": 1 - packed.axis, "block_size": packed.block}
        if scales.dtype != self.dtype:
            attributes["output_dtype"] = int(self.dtype)
        return self.node("DequantizeLinear", *inputs, **attributes)

    def offsets(self, packed: Packed) -> ir.Value:
        """What is added to scaled codes, [K / block, N] or of a table [V, H / block], in the graph's dtype."""
        if packed.offsets is None:
            raise ValueError(f"{self.name}: without offsets")
        offset = self._times_units("offset", packed.offsets, packed.offset_units, packed.axis)
        return offset if offset.dtype == self.dtype else self.node("Cast", offset, to=int(self.dtype))

    def block_sums(self, packed: Packed, turned: bool = False) -> ir.Value:
        """[K, K / block]: a product with it adds up each block. Turned: it gives all channels of a block its number."""
        inputs = packed.shape[1 - packed.axis]
        block = packed.block or inputs
        sums, name = block_sums(inputs, block), f"quantization.blocks.{inputs}.{block}"
        return self.tensor(f"{name}.turned" if turned else name, self._constant(sums.T if turned else sums))

    def _times_units(
        self, role: str, values: ir.TensorProtocol, units: ir.TensorProtocol | None, axis: int
    ) -> ir.Value:
        """Scales or offsets, which may be codes with units."""
        stored = self.initializer(f"{role}s", values)
        if units is None:
            return stored
        unit, sizes = self.initializer(f"{role}_units", units), units.shape.numpy()
        attributes = {} if len(sizes) == 0 else {"axis": axis}
        if len(sizes) == 2:
            attributes = {"axis": 1 - axis, "block_size": -(-values.shape.numpy()[1 - axis] // sizes[1 - axis])}
        return self.node("DequantizeLinear", stored, unit, dtype=unit.dtype, **attributes)

    def dequantized_experts(self, experts: Sequence[Packed]) -> ir.Value:
        """Stacked experts [E, K, N] of one format behind DequantizeLinear, blocks along K, in the graph's dtype."""
        first, (inputs, channels) = experts[0], experts[0].shape
        block = first.block or inputs
        groups = [-(-inputs // block), channels]

        def stacked(role: str, tensors: Sequence[ir.TensorProtocol], shape: Sequence[int]) -> ir.Value:
            return self.initializer(role, Stack(tensors, shape))

        scales = stacked("scales", [of_channels(expert, expert.scales) for expert in experts], groups)
        if units := [expert.scale_units for expert in experts if expert.scale_units is not None]:
            unit = stacked("scale_units", units, [])
            scales = self.node("DequantizeLinear", scales, unit, dtype=unit.dtype, axis=0)
        values = [stacked("codes", [expert.codes for expert in experts], [inputs, channels]), scales]
        if zeros := [of_channels(expert, expert.zero_points) for expert in experts if expert.zero_points is not None]:
            values.append(stacked("zero_points", zeros, groups))
        attributes: dict[str, Any] = {"axis": 1, "block_size": block}
        if scales.dtype != self.dtype:
            attributes["output_dtype"] = int(self.dtype)
        return self.node("DequantizeLinear", *values, **attributes)

    def initializer(self, role: str, tensor: ir.TensorProtocol) -> ir.Value:
        """An initializer of this weight."""
        return self.tensor(f"{self.name}.{role}", tensor)

    def constant(self, role: str, array: Any) -> ir.Value:
        """A constant of this weight: floats in the graph's dtype, integers as they are."""
        return self.initializer(role, self._constant(array))

    def tensor(self, name: str, tensor: ir.TensorProtocol) -> ir.Value:
        """An initializer."""
        return graphs.initializer(self.graph, name, tensor)

    def _constant(self, array: Any) -> ir.TensorProtocol:
        array = np.asarray(array)
        return ir.tensor(array if array.dtype.kind == "i" else array.astype(self.dtype.numpy()))

    def insert(self) -> None:
        """Put the nodes in front of the old one."""
        self.graph.insert_before(self.old, self.nodes)

    def replace(self, value: ir.Value) -> None:
        """Put the nodes in the old one's place; ``value`` is read instead of its output."""
        factor = self.old.inputs[1].producer() if self.old.inputs[1] is not None else None
        ir.convenience.replace_nodes_and_values(
            self.graph, self.old, [self.old], self.nodes, [self.old.outputs[0]], [value]
        )
        if factor is not None and not factor.outputs[0].uses():
            self.graph.remove(factor, safe=True)


def _drop_unused(graph: ir.Graph, weight: ir.Value) -> None:
    if not weight.uses() and weight.name is not None:
        graph.initializers.pop(weight.name, None)
