"""Products with weights by specrun's own operators: see ``specrun.cpu_operators``.

``FloatMatMul`` takes the place of MatMul. ``QuantizedMatMul`` takes that of DequantizeLinear and MatMul. It rounds
inputs to 8 bits itself, with a scale for each block of a token. ONNX Runtime's operators do the same. Embeddings that
are tied to the head are found in the head's weight by ``EmbeddingLookup``, and so are quantized ones.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from specbuild.compilers.cpu.experts import OPERATOR as EXPERT_MATMUL
from specbuild.graph import ops as graphs
from specbuild.graph.scales import added_to, constant
from specbuild.weights.cpu_layout import COLUMNS, by_strips, line_inputs, pack_codes, pack_floats, packed_shape
from specbuild.weights.packed import Floats, as_float32, lazy, times_units
from specrun.cpu_operators import DOMAIN, MOST_OUTPUTS, VERSION

FLOAT_CODES = (ir.DataType.FLOAT8E4M3FN, ir.DataType.FLOAT4E2M1)
"""Codes that kernels for GPUs take too. For CPUs ``cpu.formats`` makes integers of them before."""
_BITS = {ir.DataType.INT4: 4, ir.DataType.UINT4: 4, ir.DataType.INT8: 8, ir.DataType.UINT8: 8}
_BITS |= dict(zip(FLOAT_CODES, (8, 4), strict=True))
_FLOATS = (ir.DataType.FLOAT, *graphs.HALF)
_MIDDLE = {ir.DataType.INT4: 0, ir.DataType.UINT4: 8, ir.DataType.INT8: 0, ir.DataType.UINT8: 128}
"""The zero point of codes that the operator takes as they are; of UINT4 it takes 0 too."""
_INPUT_BLOCK = 32
"""Inputs that are rounded with one scale where the weight has no blocks."""
_EXPERTS_PLACE = {"QuantizedMatMul": 9, "FloatMatMul": 4}
"""Position of the input that says which weight a row has, of each operator."""
_LONGEST_BLOCK = 1 << 16
"""Sums of so many products of 8-bit numbers fit into 32 bits."""


class PackedWeight(NamedTuple):
    """Weights in the operators' layout."""

    lines: ir.Value
    scales: list[ir.Value | None]
    """Scales, units of scales, minima and units of minima of codes, in this order; empty for numbers."""
    zeros: ir.Value | None
    sizes: dict[str, int | list[int]]
    """Attributes of the operators."""


PackWeights = Callable[[ir.Graph, Sequence["Weight"], int], PackedWeight]
"""Lays out weights of one kind side by side. The last: inputs that are rounded with one scale."""


def use_own_products(model: ir.Model, pack: PackWeights | None = None) -> int:
    """Let the products of ``model``, in float32, be computed by our operators where they take them, in place.

    Returns how many there are. Products of one input are computed together. The weights in the operator's layout are
    computed when they are read. pack: lays weights out; None: as the CPU's operators want them.
    """
    pack = pack or pack_for_cpu
    nodes = list(model.graph)
    by_experts = [_multiply_by_experts(model.graph, node, pack) for node in nodes if node.op_type == EXPERT_MATMUL]
    products = [product for node in nodes if node.op_type == "MatMul" and (product := _product(node)) is not None]
    tables = [look for node in nodes if node.op_type == "Gather" and (look := _lookup(node)) is not None]
    adding = {node for product in products for node in product.adding} | {
        node for look in tables for node in look.adding
    }
    groups_by_key: dict[Any, list[_Product]] = {}
    for product in products:
        if product.nodes[0] not in adding:
            groups_by_key.setdefault(product.group, []).append(product)
    lookups: dict[tuple[ir.Value, bool], list[_Product]] = {}
    """Row lookups, by the value that holds the table's numbers or codes and by its layout."""
    for lookup in tables:
        if lookup.nodes[0] not in adding:
            lookups.setdefault(lookup.weight.origin, []).append(lookup)
    groups = [
        group[i : i + MOST_OUTPUTS] for group in groups_by_key.values() for i in range(0, len(group), MOST_OUTPUTS)
    ]
    for group in groups:
        packed = _replace(model.graph, group, pack)
        for lookup in lookups.pop(group[0].weight.origin, []) if len(group) == 1 else ():
            _look_up(model.graph, lookup, packed)
    for left in lookups.values():
        for lookup in left:
            if lookup.weight.bits != 32:  # Numbers that no product has stay as they are.
                _look_up(model.graph, lookup, pack(model.graph, [lookup.weight], lookup.block))
    model.opset_imports[DOMAIN] = VERSION
    return sum(map(len, groups)) + sum(by_experts)


@dataclass(frozen=True)
class _BlockValues:
    """Scales or minima: a number for each block of each column, or for each column."""

    stored: ir.TensorProtocol
    """[N] or [blocks, N]."""
    units: ir.TensorProtocol | None = None
    """Factors of ``stored`` where that holds codes: [], [N] or [units, N]."""
    is_transposed: bool = False
    """Whether ``stored`` and ``units`` are stored as [N, ..]."""

    @property
    def has_codes(self) -> bool:
        """Whether the operators take the codes as they are."""
        return self.stored.dtype == ir.DataType.INT8 and self.units is not None

    @property
    def num_units(self) -> int:
        """How many units a column of codes has; 0 where they are no codes."""
        if self.units is None or not self.has_codes:
            return 0
        return int(self.units.shape.numpy()[1 if self.is_transposed else 0]) if len(self.units.shape) == 2 else 1

    def turned(self, tensor: ir.TensorProtocol | None) -> npt.NDArray[Any]:
        """``stored`` or ``units`` as [N] or [.., N]."""
        assert tensor is not None
        return tensor.numpy().T if self.is_transposed else tensor.numpy()

    def numbers(self) -> Floats:
        """In float32, [N] or [blocks, N]."""
        matrix = as_float32(self.stored)
        if self.units is not None:
            matrix = times_units(matrix, as_float32(self.units), 0 if self.is_transposed else 1)
        return matrix.T if self.is_transposed else matrix


@dataclass(frozen=True)
class Weight:
    """A weight [K, N] of numbers, or of codes that a DequantizeLinear makes numbers of."""

    name: str
    stored: ir.Value
    """Numbers or codes."""
    readers: int
    scales: _BlockValues | None = None
    zeros: ir.TensorProtocol | None = None
    minima: _BlockValues | None = None
    """Numbers to add to scaled codes."""
    block: int = 0
    """Input channels that share a scale; 0: all of a column."""
    is_transposed: bool = False
    """Whether numbers, codes and scales are stored as [N, ..]."""

    @property
    def origin(self) -> tuple[ir.Value, bool]:
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
    def has_floats(self) -> bool:
        """Whether its codes are float8 or float4."""
        return self.codes.dtype in FLOAT_CODES

    @property
    def has_zeros(self) -> bool:
        """Whether it has zero points other than the operator's own."""
        return self.zeros is not None or self.codes.dtype == ir.DataType.UINT8

    @property
    def middle(self) -> int:
        """The code that stands for zero, or for the zero point, in the operator's layout."""
        return 128 if self.bits == 8 else 0 if self.codes.dtype == ir.DataType.UINT4 and self.zeros is None else 8

    @property
    def kind(self) -> tuple[int, ...]:
        """The same for weights that one operator can have side by side."""
        units = [values.num_units if values else -1 for values in (self.scales, self.minima)]
        return self.bits, self.has_floats, self.scale_blocks, self.has_zeros, self.middle, *units

    @property
    def scale_blocks(self) -> int:
        """How many scales a column has."""
        return -(-self.shape[0] // self.block) if self.block else 1


@dataclass(frozen=True)
class _Product:
    """A product that the operator takes, or rows of a table that are looked up."""

    weight: Weight
    """A table as a weight has the rows that are looked up as its columns."""
    nodes: tuple[ir.Node, ...]
    """Nodes that are replaced: the MatMul or Gather, and the Add of its minima."""
    adding: tuple[ir.Node, ...] = ()
    """Nodes that compute what the minima add."""

    @property
    def x(self) -> ir.Value | None:
        """What the weight is multiplied by."""
        return self.nodes[0].inputs[0]

    @property
    def block(self) -> int:
        """Inputs that are rounded with one scale."""
        return 1 if self.weight.bits == 32 else self.weight.block or _INPUT_BLOCK

    @property
    def group(self) -> object:
        """Products of one group can be computed together; one whose weight others read is computed alone."""
        return self.x, self.block, self.weight.kind, self.nodes[0] if self.weight.readers > 1 else None


def _weight(value: ir.Value | None, is_transposed: bool = False) -> Weight | None:
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
    return Weight(name, value, readers or len(value.uses()), is_transposed=is_transposed)


def _dequantized(node: ir.Node, readers: int, is_transposed: bool) -> Weight | None:
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
    if any((use.node.op_type, use.idx) not in places for use in uses if use.node.op_type != EXPERT_MATMUL):
        return None
    if zeros is not None and zeros.const_value is None:
        return None
    block = node.attributes.get_int("block_size", 0)
    axis = node.attributes.get_int("axis", 1)
    zero_points = zeros.const_value if zeros is not None else None
    if (steps := _block_values(scales, is_transposed)) is None:
        return None
    weight = Weight(str(codes.name), codes, readers, steps, zero_points, None, block, is_transposed)
    fits = axis % 2 == (is_transposed if block else not is_transposed) and block <= _LONGEST_BLOCK
    return weight if fits and block % line_inputs(weight.bits) == 0 else None


def _block_values(value: ir.Value | None, is_transposed: bool) -> _BlockValues | None:
    """Constants, which Transpose and Cast may stand behind, and which may be codes; None where they are none."""
    while value is not None and (node := value.producer()) is not None:
        if node.op_type == "Transpose":
            is_transposed = not is_transposed
        elif node.op_type == "DequantizeLinear":
            codes, units = constant(node.inputs[0]), constant(node.inputs[1])
            if codes is None or units is None or len(node.inputs) > 2:
                return None
            return _BlockValues(codes, units, is_transposed)
        elif node.op_type != "Cast":
            return None
        value = node.inputs[0]
    return None if value is None or value.const_value is None else _BlockValues(value.const_value, None, is_transposed)


def _product(product: ir.Node) -> _Product | None:
    """None where the weight is of a kind that the operators do not have."""
    x, weight = product.inputs[0], _weight(product.inputs[1])
    if x is None or weight is None:
        return None
    added = added_to(product) if weight.bits < 32 else None
    if added is None or not added.are_offsets(x, weight.shape[0], weight.block):
        return _Product(weight, (product,))
    if (minima := _block_values(added.product.inputs[1], False)) is None:
        return None
    return _Product(replace(weight, minima=minima), (product, added.add), (added.left, added.product))


def _lookup(gather: ir.Node) -> _Product | None:
    """None where the operator does not take it."""
    ids = gather.inputs[1]
    if gather.attributes.get_int("axis", 0) != 0 or ids is None or ids.dtype != ir.DataType.INT64:
        return None
    table = _weight(gather.inputs[0], is_transposed=True)
    if table is None or table.has_zeros:
        return None
    added = added_to(gather)
    if added is None or not added.are_rows_of_offsets(ids, table.shape[0], table.block):
        return _Product(table, (gather,))
    if (minima := _block_values(added.left.inputs[0], True)) is None:
        return None
    return _Product(replace(table, minima=minima), (gather, added.add), (added.left, added.product))


def _replace(graph: ir.Graph, group: list[_Product], pack: PackWeights) -> PackedWeight:
    """Let one node compute the products, whose weights lie side by side. Returns these."""
    first, packed = group[0], pack(graph, [product.weight for product in group], group[0].block)
    name = f"{first.nodes[0].name}.product"
    operator, inputs = _operator(first.x, packed)
    replacement = ir.node(operator, inputs, packed.sizes, domain=DOMAIN, num_outputs=len(group), name=name)
    for number, output in enumerate(replacement.outputs):
        output.name, output.dtype = f"{name}.{number}", ir.DataType.FLOAT
    old = [node for product in group for node in reversed(product.nodes)]
    results = [product.nodes[-1].outputs[0] for product in group]
    ir.convenience.replace_nodes_and_values(graph, first.nodes[0], old, [replacement], results, replacement.outputs)
    return packed


def _look_up(graph: ir.Graph, lookup: _Product, packed: PackedWeight) -> None:
    """Let embeddings be found in the weight of a product; what casts them is not needed then."""
    gather, last = lookup.nodes[0], lookup.nodes[-1]
    if last.outputs[0].dtype in graphs.HALF:
        readers = [use.node for use in last.outputs[0].uses()]
        if len(readers) != 1 or readers[0].op_type != "Cast":
            return
        last = readers[0]
    old = last.outputs[0]
    name = f"{gather.name}.lookup"
    inputs = [gather.inputs[1], packed.lines, *packed.scales]
    replacement = ir.node("EmbeddingLookup", inputs, packed.sizes, domain=DOMAIN, name=name)
    replacement.outputs[0].name, replacement.outputs[0].type, replacement.outputs[0].shape = name, old.type, old.shape
    removed = list(dict.fromkeys([last, *reversed(lookup.nodes)]))
    ir.convenience.replace_nodes_and_values(graph, gather, removed, [replacement], [old], replacement.outputs)


def _multiply_by_experts(graph: ir.Graph, product: ir.Node, pack: PackWeights) -> int:
    """Let one of our products multiply each row by its expert's weight. Returns how many weights there are."""
    x, experts, *values = product.inputs
    weights = [weight for value in values if (weight := _weight(value)) is not None]
    if len(weights) < len(values) or len({(weight.kind, weight.shape, weight.block) for weight in weights}) > 1:
        raise ValueError(f"{product.name}: experts differ in how they are stored, or no product takes them")
    first = weights[0]
    packed = pack(graph, weights, _Product(first, (product,)).block)
    operator, inputs = _operator(x, packed)
    inputs += [None] * (_EXPERTS_PLACE[operator] - len(inputs)) + [experts]
    attributes = packed.sizes | {"N": [first.shape[1]], "experts": len(weights)}
    replacement = ir.node(operator, inputs, attributes, domain=DOMAIN, name=product.name)
    replacement.outputs[0].name, replacement.outputs[0].dtype = product.outputs[0].name, ir.DataType.FLOAT
    ir.convenience.replace_nodes_and_values(
        graph, product, [product], [replacement], product.outputs, replacement.outputs
    )
    return len(weights)


def _operator(x: ir.Value | None, packed: PackedWeight) -> tuple[str, list[ir.Value | None]]:
    """The operator that multiplies by these weights, and its inputs so far."""
    inputs: list[ir.Value | None] = [x, packed.lines]
    if packed.scales:
        inputs += [packed.scales[0], packed.zeros]
    if any(packed.scales[1:]):
        inputs += [None, None, *packed.scales[1:]]  # Between them is what fusions add.
    while inputs[-1] is None:
        del inputs[-1]
    return "QuantizedMatMul" if packed.scales else "FloatMatMul", inputs


def pack_for_cpu(graph: ir.Graph, weights: Sequence[Weight], block: int) -> PackedWeight:
    """Weights of one kind, side by side. block: inputs that are rounded with one scale."""
    rows, bits = weights[0].shape[0], weights[0].bits

    def joined(role: str, dtype: ir.DataType, sizes: tuple[int, int], read: Callable[[Weight], Any]) -> ir.Value:
        strips = sum(packed_shape(*weight.shape, bits)[0] for weight in weights)
        name = f"{weights[0].name}.{role}"
        tensor = lazy(dtype, [strips, *sizes], lambda: np.concatenate([read(weight) for weight in weights]), name)
        return graphs.initializer(graph, name, tensor)

    def block_values(role: str, all_values: list[_BlockValues | None]) -> list[ir.Value | None]:
        """Scales or minima, and their units."""
        first, blocks = all_values[0], weights[0].scale_blocks
        if first is None:
            return [None, None]
        by_weight = dict(zip(map(id, weights), all_values, strict=True))

        def read(weight: Weight, kind: Callable[[_BlockValues], Any], blocks: int) -> Any:
            values = by_weight[id(weight)]
            assert values is not None
            return by_strips(np.broadcast_to(kind(values), (blocks, weight.shape[1])))

        if first.has_codes:
            codes = functools.partial(read, kind=lambda values: values.turned(values.stored), blocks=blocks)
            units = functools.partial(read, kind=lambda values: values.turned(values.units), blocks=first.num_units)
            return [
                joined(role, ir.DataType.INT8, (blocks, COLUMNS), codes),
                joined(f"{role}.units", ir.DataType.FLOAT, (first.num_units, COLUMNS), units),
            ]
        dtype, shorten = _shortest([values.numbers() for values in all_values if values])
        numbers = functools.partial(read, kind=lambda values: shorten(values.numbers()), blocks=blocks)
        return [joined(role, dtype, (blocks, COLUMNS), numbers), None]

    columns = [weight.shape[1] for weight in weights]
    sizes: dict[str, int | list[int]] = {"K": rows, "N": columns}
    if bits == 32:
        return PackedWeight(joined("lines", ir.DataType.FLOAT, (rows, COLUMNS), _floats), [], None, sizes)
    lines = joined("lines", ir.DataType.UINT8, packed_shape(*weights[0].shape, bits)[1:], _codes)
    scales = block_values("strips", [weight.scales for weight in weights])
    scales += block_values("minima", [weight.minima for weight in weights])
    zeros = None
    if weights[0].has_zeros:
        blocks = -(-rows // block)
        read_zeros = functools.partial(_zeros, blocks=blocks)
        zeros = joined(f"zeros.{blocks}", ir.DataType.INT8, (blocks, COLUMNS), read_zeros)
    return PackedWeight(lines, scales, zeros, sizes | {"bits": bits, "block_size": block, "middle": weights[0].middle})


def _floats(weight: Weight) -> Floats:
    numbers = as_float32(weight.codes)
    return pack_floats(numbers.T if weight.is_transposed else numbers)


def _codes(weight: Weight) -> npt.NDArray[np.uint8]:
    codes = np.asarray(weight.codes.numpy())
    return pack_codes(codes.T if weight.is_transposed else codes, weight.bits)


def _shortest(all_numbers: list[Floats]) -> tuple[ir.DataType, Callable[[Floats], npt.NDArray[Any]]]:
    """The fewest bits that hold all these numbers, and what turns them into what the operators read."""
    if not any((numbers.view(np.uint32) & 0xFFFF).any() for numbers in map(np.ascontiguousarray, all_numbers)):
        return ir.DataType.UINT16, lambda numbers: (np.ascontiguousarray(numbers).view(np.uint32) >> 16).astype(
            np.uint16
        )
    with np.errstate(over="ignore"):
        if all((numbers.astype(np.float16) == numbers).all() for numbers in all_numbers):
            return ir.DataType.FLOAT16, lambda numbers: numbers.astype(np.float16)
    return ir.DataType.FLOAT, lambda numbers: numbers


def _zeros(weight: Weight, blocks: int) -> npt.NDArray[np.int8]:
    """Zero points less the operator's own."""
    zeros = np.zeros((), np.int16) if weight.zeros is None else np.asarray(weight.zeros.numpy()).astype(np.int16)
    centered = ((zeros.T if weight.is_transposed else zeros) - _MIDDLE[weight.codes.dtype]).astype(np.int8)
    return by_strips(np.broadcast_to(centered, (blocks, weight.shape[1])))
