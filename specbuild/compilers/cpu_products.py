"""Products with weights by specrun's own operators: see ``specrun.cpu_operators``.

``FloatMatMul`` takes the place of MatMul. ``QuantizedMatMul`` takes that of DequantizeLinear and MatMul. It rounds
inputs to 8 bits itself, with a scale for each block of a token. ONNX Runtime's operators do the same. Embeddings that
are tied to the head are found in the head's weight by ``EmbeddingLookup``, and so are quantized ones.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from specbuild.graph import ops as graphs
from specbuild.weights.cpu_layout import COLUMNS, by_strips, line_inputs, pack_codes, pack_floats, packed_shape
from specbuild.weights.packed import Floats, as_float32
from specrun.cpu_operators import DOMAIN, MOST_OUTPUTS, VERSION

_BITS = {ir.DataType.INT4: 4, ir.DataType.UINT4: 4, ir.DataType.INT8: 8, ir.DataType.UINT8: 8}
_FLOATS = (ir.DataType.FLOAT, *graphs.HALF)
_MIDDLE = {ir.DataType.INT4: 0, ir.DataType.UINT4: 8, ir.DataType.INT8: 0, ir.DataType.UINT8: 128}
"""The zero point of codes that the operator takes as they are."""
_INPUT_BLOCK = 32
"""Inputs that are rounded with one scale where the weight has no blocks."""
_LONGEST_BLOCK = 1 << 16
"""Sums of so many products of 8-bit numbers fit into 32 bits."""


def use_own_products(model: ir.Model) -> int:
    """Let the products of ``model``, in float32, be computed by our operators where they take them, in place.

    Returns how many there are. Products of one input are computed together. The weights in the operator's layout are
    computed when they are read.
    """
    found: dict[Any, list[_Product]] = {}
    lookups: dict[tuple[ir.Value, bool], list[tuple[ir.Node, _Weight]]] = {}
    """Where rows of a table are looked up, by what holds its numbers or codes and how it lies."""
    for node in list(model.graph):  # Not those in branches: ONNX Runtime has experts' codes there.
        if node.op_type == "MatMul" and (product := _product(node)) is not None:
            found.setdefault(product.group, []).append(product)
        elif node.op_type == "Gather" and (table := _table(node)) is not None:
            lookups.setdefault(table.place, []).append((node, table))
    groups = [group[i : i + MOST_OUTPUTS] for group in found.values() for i in range(0, len(group), MOST_OUTPUTS)]
    if not groups:
        return 0
    for group in groups:
        packed = _replace(model.graph, group)
        for node, _ in lookups.pop(group[0].weight.place, []) if len(group) == 1 else ():
            _look_up(model.graph, node, packed)
    for nodes in lookups.values():
        for node, table in nodes:
            if table.bits != 32:  # Numbers that no product has stay as they are.
                _look_up(model.graph, node, _pack(model.graph, [table], table.block or _INPUT_BLOCK))
    model.opset_imports[DOMAIN] = VERSION
    return sum(map(len, groups))


@dataclass(frozen=True)
class _Weight:
    """A weight [K, N] of numbers, or of codes that a DequantizeLinear makes numbers of."""

    name: str
    stored: ir.Value
    """Numbers or codes."""
    readers: int
    scales: tuple[ir.TensorProtocol, ...] = ()
    """Factors of the scales."""
    zeros: ir.TensorProtocol | None = None
    block: int = 0
    """0: one scale a column."""
    is_transposed: bool = False
    """Whether numbers, codes and scales lie as [N, ..]."""

    @property
    def place(self) -> tuple[ir.Value, bool]:
        """The same for weights that are tied: an embedding's rows are the columns of the head's weight."""
        return self.stored, self.is_transposed

    @property
    def codes(self) -> ir.TensorProtocol:
        """Or numbers."""
        assert self.stored.const_value is not None
        return self.stored.const_value

    @property
    def shape(self) -> tuple[int, int]:
        """[K, N]"""
        rows, columns = (int(size) for size in self.codes.shape)  # type: ignore[arg-type]
        return (columns, rows) if self.is_transposed else (rows, columns)

    @property
    def bits(self) -> int:
        """Of a code; 32 of a number."""
        return _BITS.get(self.codes.dtype, 32)

    @property
    def has_zeros(self) -> bool:
        """Whether it has zero points other than the operator's own."""
        return self.zeros is not None or bool(_MIDDLE.get(self.codes.dtype))

    @property
    def scale_blocks(self) -> int:
        """How many scales a column has."""
        return -(-self.shape[0] // self.block) if self.block else 1


@dataclass(frozen=True)
class _Product:
    """A product that the operator takes."""

    x: ir.Value
    weight: _Weight
    block: int
    """Inputs that are rounded with one scale."""
    node: ir.Node
    """The MatMul that it replaces."""

    @property
    def group(self) -> object:
        """Products of one group can be computed together; one whose weight others read is by itself."""
        weight = self.weight
        alone = self.node if weight.readers > 1 else None
        return self.x, weight.bits, self.block, weight.scale_blocks, weight.has_zeros, alone


def _weight(value: ir.Value | None, is_transposed: bool = False) -> _Weight | None:
    """A constant matrix, which Transpose and Cast may stand behind; None where it is none.

    is_transposed: it is read as [N, K].
    """
    name, readers = str(value.name) if value is not None else "", 0
    while value is not None and not value.is_initializer():
        node = value.producer()
        readers = max(readers, len(value.uses()))
        if node is not None and node.op_type == "DequantizeLinear":
            return _dequantized(node, readers, is_transposed)
        if node is None or node.op_type not in ("Transpose", "Cast"):
            return None
        if node.op_type == "Transpose":
            if "perm" in node.attributes and tuple(node.attributes["perm"].as_ints()) != (1, 0):
                return None
            is_transposed = not is_transposed
        value = node.inputs[0]
    if value is None or value.const_value is None or value.dtype not in _FLOATS:
        return None
    if value.shape is None or len(value.shape) != 2:
        return None
    return _Weight(name, value, readers or len(value.uses()), is_transposed=is_transposed)


def _dequantized(node: ir.Node, readers: int, is_transposed: bool) -> _Weight | None:
    """None where the operators do not take it, or its codes are read in another way too: they would be kept twice."""
    codes, scales, zeros = (*node.inputs, None)[:3]
    if codes is None or scales is None or not codes.is_initializer() or codes.dtype not in _BITS:
        return None
    if codes.shape is None or len(codes.shape) != 2 or codes.const_value is None:
        return None
    dequantizing = [use.node for use in codes.uses()]
    uses = [use for other in dequantizing for use in other.outputs[0].uses()]
    places = {("MatMul", 1), ("Transpose", 0), ("Gather", 0)}
    if any(other.op_type != "DequantizeLinear" for other in dequantizing):
        return None
    if any((use.node.op_type, use.idx) not in places for use in uses):
        return None
    if zeros is not None and zeros.const_value is None:
        return None
    block = node.attributes.get_int("block_size", 0)
    axis = node.attributes.get_int("axis", 1)
    zero_points = zeros.const_value if zeros is not None else None
    factors = tuple(graphs.constant_factors(scales))
    weight = _Weight(str(codes.name), codes, readers, factors, zero_points, block, is_transposed)
    fits = axis % 2 == (is_transposed if block else not is_transposed) and block <= _LONGEST_BLOCK
    return weight if fits and block % line_inputs(weight.bits) == 0 else None


def _product(product: ir.Node) -> _Product | None:
    """None where the weight is of a kind that the operators do not have."""
    x, weight = product.inputs[0], _weight(product.inputs[1])
    if x is None or weight is None:
        return None
    return _Product(x, weight, 1 if weight.bits == 32 else weight.block or _INPUT_BLOCK, product)


def _table(gather: ir.Node) -> _Weight | None:
    """The weight whose columns are the rows that are looked up; None where the operator does not take it."""
    ids = gather.inputs[1]
    if gather.attributes.get_int("axis", 0) != 0 or ids is None or ids.dtype != ir.DataType.INT64:
        return None
    table = _weight(gather.inputs[0], is_transposed=True)
    return None if table is None or table.has_zeros else table


def _replace(graph: ir.Graph, group: list[_Product]) -> _Packed:
    """Let one node compute the products, whose weights lie side by side. Returns these."""
    first, packed = group[0], _pack(graph, [product.weight for product in group], group[0].block)
    name = f"{first.node.name}.product"
    operator = "FloatMatMul" if first.weight.bits == 32 else "QuantizedMatMul"
    inputs = [first.x, *packed.tensors]
    own = ir.node(operator, inputs, packed.sizes, domain=DOMAIN, num_outputs=len(group), name=name)
    for number, output in enumerate(own.outputs):
        output.name, output.dtype = f"{name}.{number}", ir.DataType.FLOAT
    old = [product.node for product in group]
    results = [product.node.outputs[0] for product in group]
    ir.convenience.replace_nodes_and_values(graph, first.node, old, [own], results, own.outputs)
    return packed


def _look_up(graph: ir.Graph, gather: ir.Node, packed: _Packed) -> None:
    """Let embeddings be found in the weight of a product; what casts them is not needed then."""
    last = gather
    if gather.outputs[0].dtype in graphs.HALF:
        readers = [use.node for use in gather.outputs[0].uses()]
        if len(readers) != 1 or readers[0].op_type != "Cast":
            return
        last = readers[0]
    old = last.outputs[0]
    name = f"{gather.name}.lookup"
    own = ir.node("EmbeddingLookup", [gather.inputs[1], *packed.tensors], packed.sizes, domain=DOMAIN, name=name)
    own.outputs[0].name, own.outputs[0].type, own.outputs[0].shape = name, old.type, old.shape
    removed = [last] if last is gather else [last, gather]
    ir.convenience.replace_nodes_and_values(graph, gather, removed, [own], [old], own.outputs)


class _Packed(NamedTuple):
    """Weights in the operators' layout."""

    tensors: list[ir.Value]
    """Lines, and of codes scales, and perhaps zero points."""
    sizes: dict[str, int | list[int]]
    """Attributes of the operators."""


def _pack(graph: ir.Graph, weights: list[_Weight], block: int) -> _Packed:
    """Weights of one kind, side by side. block: inputs that are rounded with one scale."""
    rows, bits = weights[0].shape[0], weights[0].bits

    def joined(role: str, dtype: ir.DataType, sizes: tuple[int, int], read: Callable[[_Weight], Any]) -> ir.Value:
        strips = sum(packed_shape(*weight.shape, bits)[0] for weight in weights)
        name = f"{weights[0].name}.{role}"
        tensor = ir.LazyTensor(
            lambda: ir.tensor(np.concatenate([read(weight) for weight in weights])),
            dtype,
            ir.Shape([strips, *sizes]),
            name=name,
        )
        return graphs.initializer(graph, name, tensor)

    columns = [weight.shape[1] for weight in weights]
    sizes: dict[str, int | list[int]] = {"K": rows, "N": columns}
    if bits == 32:
        return _Packed([joined("lines", ir.DataType.FLOAT, (rows, COLUMNS), _floats)], sizes)
    lines = joined("lines", ir.DataType.UINT8, packed_shape(*weights[0].shape, bits)[1:], _codes)
    half_scales = all(_are_halves(weight) for weight in weights)
    read_scales, dtype = (_halves, ir.DataType.UINT16) if half_scales else (_scales, ir.DataType.FLOAT)
    tensors = [lines, joined("strips", dtype, (weights[0].scale_blocks, COLUMNS), read_scales)]
    if weights[0].has_zeros:
        blocks = -(-rows // block)
        read = functools.partial(_zeros, blocks=blocks)
        tensors.append(joined(f"zeros.{blocks}", ir.DataType.INT8, (blocks, COLUMNS), read))
    return _Packed(tensors, sizes | {"bits": bits, "block_size": block, "half_scales": int(half_scales)})


def _floats(weight: _Weight) -> Floats:
    numbers = as_float32(weight.codes)
    return pack_floats(numbers.T if weight.is_transposed else numbers)


def _codes(weight: _Weight) -> npt.NDArray[np.uint8]:
    codes = np.asarray(weight.codes.numpy())
    return pack_codes(codes.T if weight.is_transposed else codes, weight.bits)


def _turned(weight: _Weight, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Scales or zero points as [blocks, N], or as they are where there are no blocks."""
    return values.T if weight.is_transposed else values


def _all_scales(weight: _Weight) -> npt.NDArray[np.float32]:
    return _turned(weight, np.asarray(math.prod(as_float32(factor) for factor in weight.scales), np.float32))


def _are_halves(weight: _Weight) -> bool:
    """Whether the scales are bfloat16's, the upper half of float32's."""
    return not (_all_scales(weight).view(np.uint32) & 0xFFFF).any()


def _scales(weight: _Weight) -> npt.NDArray[np.float32]:
    return by_strips(np.broadcast_to(_all_scales(weight), (weight.scale_blocks, weight.shape[1])))


def _halves(weight: _Weight) -> npt.NDArray[np.uint16]:
    return (_scales(weight).view(np.uint32) >> 16).astype(np.uint16)


def _zeros(weight: _Weight, blocks: int) -> npt.NDArray[np.int8]:
    """Zero points less the operator's own."""
    zeros = np.zeros((), np.int16) if weight.zeros is None else np.asarray(weight.zeros.numpy()).astype(np.int16)
    own = (_turned(weight, zeros) - _MIDDLE[weight.codes.dtype]).astype(np.int8)
    return by_strips(np.broadcast_to(own, (blocks, weight.shape[1])))
