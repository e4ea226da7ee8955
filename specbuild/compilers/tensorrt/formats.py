"""Rewrites graphs, mostly quantized linear layers, in formats that TensorRT takes.

TensorRT takes only positive scales: where one is negative, codes are negated. It takes no zero points:
``x @ ((q - z) * s)`` is ``x @ ((q - m) * s) + sums(x) @ ((m - z) * s)``, where m is the middle of the codes and sums
adds up the channels that share a scale. The first product keeps its packed weight, and the second is small. Inputs in
float4 are rounded by an operator of TensorRT, and inputs in 8 bits with a scale for each token.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from specbuild.graph import ops as graphs
from specbuild.graph.scales import add_offsets, added_to, constant, make_numbers_of_scales
from specbuild.weights.packed import as_float32, lazy
from specrun.errors import BuildError

FLOAT4_BLOCK = 16
"""Number of values of an input that share a scale."""
_MIDDLE = {ir.DataType.UINT4: 8, ir.DataType.UINT8: 128, ir.DataType.INT4: 0, ir.DataType.INT8: 0}
_TOKEN_CODES = {"int8": (ir.DataType.INT8, 127), "float8": (ir.DataType.FLOAT8E4M3FN, 448)}
"""The type of an input's codes, and its largest code."""
_COLUMNS = 1024
"""Number of columns of a weight that are rounded at a time."""
_ByChannel = tuple[npt.NDArray[Any], npt.NDArray[Any]]
"""Codes and scales."""


def turn_negative_scales(model: ir.Model) -> int:
    """Rewrite the weights of ``model`` with scales of 0 or below, as GGUF's may have, in place. Returns their number.

    New weights are tensors that are computed when they are read, and not in the files of ``model``.
    """
    make_numbers_of_scales(model)
    return sum(_turn(model.graph, node) for node in list(model.graph) if node.op_type == "DequantizeLinear")


def move_zero_points(model: ir.Model) -> int:
    """Rewrite the weights of ``model`` that have zero points, in place. Returns their number.

    New weights are tensors that are computed when they are read, and not in the files of ``model``.
    """
    make_numbers_of_scales(model)
    weights = [node for node in model.graph if node.op_type == "DequantizeLinear" and _zero_points(node) is not None]
    for node in weights:
        _move(model.graph, node)
    RemoveUnusedNodesPass()(model)
    return len(weights)


def round_float4_inputs(model: ir.Model) -> int:
    """Let TensorRT round the inputs of linear layers that are marked for float4, in place. Returns their number.

    Its operator computes a float8 scale for every 16 values.
    """
    nodes = [node for node in model.graph if graphs.FLOAT4_INPUT in node.metadata_props]
    for node in nodes:
        x = graphs.input_of(node, 0)
        assert x.dtype is not None
        scale = ir.Tensor(np.asarray(float(node.metadata_props[graphs.FLOAT4_INPUT]), x.dtype.numpy()))
        unit = graphs.initializer(model.graph, f"{node.name}.float4_scale", scale)
        attributes = {"axis": -1, "block_size": FLOAT4_BLOCK, "scale_type": int(ir.DataType.FLOAT8E4M3FN)}
        rounded = ir.node("TRT_FP4DynamicQuantize", [x, unit], attributes, domain="trt", num_outputs=2)
        scales = ir.node("DequantizeLinear", [rounded.outputs[1], unit])
        wide = ir.node(
            "DequantizeLinear", [rounded.outputs[0], scales.outputs[0]], {"axis": -1, "block_size": FLOAT4_BLOCK}
        )
        for new, role in ((rounded, "rounded"), (scales, "scales"), (wide, "wide")):
            new.name = f"{node.name}.float4_{role}"
            for number, value in enumerate(new.outputs):
                value.name = f"{new.name}.{number}"
        rounded.outputs[0].dtype, rounded.outputs[1].dtype = ir.DataType.FLOAT4E2M1, ir.DataType.FLOAT8E4M3FN
        scales.outputs[0].dtype = wide.outputs[0].dtype = x.dtype
        model.graph.insert_before(node, [rounded, scales, wide])
        node.replace_input_with(0, wide.outputs[0])
    if nodes:
        model.graph.opset_imports["trt"] = 1
    return len(nodes)


def round_token_inputs(model: ir.Model) -> int:
    """Round the inputs of marked linear layers with a scale for each token, in place.

    A token is divided by its largest value, so one constant scale serves all tokens. TensorRT multiplies two matrices
    of int8 only where a column has one scale, so weights in groups are rounded once more. Returns their number. They
    are tensors that are computed when they are read, and not in the files of ``model``.
    """
    products = [node for node in model.graph if graphs.TOKEN_INPUT in node.metadata_props]
    rounded: dict[tuple[ir.Value, str], tuple[ir.Value, ir.Value]] = {}
    recoded = 0
    read: Any = functools.lru_cache(maxsize=1)(_by_channel)  # Codes and scales are written one after the other.
    for node in products:
        x, form = graphs.input_of(node, 0), node.metadata_props[graphs.TOKEN_INPUT]
        if (x, form) not in rounded:
            rounded[x, form] = _round_tokens(model.graph, node, x, form)
        small, amax = rounded[x, form]
        node.replace_input_with(0, small)
        y = node.outputs[0]
        scaled = ir.node("Mul", [y, amax], name=f"{node.name}.times_amax")
        scaled.outputs[0].name, scaled.outputs[0].type = scaled.name, y.type
        for use in [use for use in y.uses() if use.node is not scaled]:
            use.node.replace_input_with(use.idx, scaled.outputs[0])
        model.graph.insert_after(node, scaled)
        weight = node.inputs[1].producer() if node.inputs[1] is not None else None
        if weight is not None and weight.op_type == "Transpose" and weight.inputs[0] is not None:
            weight = weight.inputs[0].producer()
        if form == "int8" and weight is not None and weight.op_type == "DequantizeLinear":
            recoded += _rescale_by_channel(model.graph, weight, read)
    RemoveUnusedNodesPass()(model)
    return recoded


def _round_tokens(graph: ir.Graph, before: ir.Node, x: ir.Value, form: str) -> tuple[ir.Value, ir.Value]:
    """Tokens divided by their largest values and rounded; and these values."""
    codes, largest_code, nodes = *_TOKEN_CODES[form], list[ir.Node]()
    dtype = x.dtype
    assert dtype is not None

    def constant(role: str, values: Any) -> ir.Value:
        return graphs.initializer(graph, f"quantization.{role}", ir.tensor(values))

    def add_node(op_type: str, *inputs: ir.Value, kind: ir.DataType = dtype, **attributes: int) -> ir.Value:
        nodes.append(ir.node(op_type, inputs, attributes, name=f"{x.name}.{form}.{len(nodes)}"))
        value = nodes[-1].outputs[0]
        value.name, value.dtype = nodes[-1].name, kind
        return value

    smallest = 2.0**-14 if dtype == ir.DataType.FLOAT16 else 2.0**-126  # A divisor for tokens of zeros: normal.
    amax = add_node("ReduceMax", add_node("Abs", x), constant("last_axis", np.array([-1])), keepdims=1)
    amax = add_node("Max", amax, constant("smallest", np.array(smallest, dtype.numpy())))
    step = constant(f"step_{form}", np.array(1 / largest_code, dtype.numpy()))
    zero = graphs.initializer(graph, f"quantization.zero_{form}", ir.Tensor(np.zeros((), codes.numpy()), dtype=codes))
    small = add_node("QuantizeLinear", add_node("Div", x, amax), step, zero, kind=codes)
    small = add_node("DequantizeLinear", small, step, zero)
    graph.insert_before(before, nodes)
    return small, amax


def _rescale_by_channel(
    graph: ir.Graph, node: ir.Node, read: Callable[[ir.TensorProtocol, ir.TensorProtocol, int, int], _ByChannel]
) -> bool:
    """Give an int8 weight one scale for each output channel. Returns whether it had groups of input channels.

    It is [K, N], or [N, K] where an embedding is tied to it, which then has the same codes; or [E, K, N] of experts.
    """
    codes, scales, block = node.inputs[0], node.inputs[1], node.attributes.get_int("block_size", 0)
    if not block or codes is None or codes.dtype != ir.DataType.INT8 or _zero_points(node) is not None:
        return False
    stored, steps = codes.const_value, scales.const_value if scales is not None else None
    assert stored is not None and steps is not None
    axis = node.attributes["axis"].as_int()
    shape = [int(size) for size in stored.shape.numpy()]
    inputs, is_experts = shape[axis], len(shape) == 3
    scale_shape = [1 if number == axis else size for number, size in enumerate(shape) if is_experts or number != axis]

    def add_initializer(role: str, index: int, dtype: ir.DataType, sizes: list[int]) -> ir.Value:
        name = f"{codes.name}.by_channel.{role}"
        part = lazy(dtype, sizes, lambda: read(stored, steps, block, axis)[index].reshape(sizes), name)
        return graphs.initializer(graph, name, part)

    new = add_initializer("codes", 0, stored.dtype, shape), add_initializer("scales", 1, steps.dtype, scale_shape)
    for reader in [use.node for use in codes.uses()]:
        for index, value in enumerate(new):
            reader.replace_input_with(index, value)
        reader.attributes["axis"] = ir.AttrInt64("axis", axis if is_experts else 1 - axis)
        reader.attributes["block_size"] = ir.AttrInt64("block_size", inputs)
        if not is_experts:
            del reader.attributes["block_size"]
    return True


def _by_channel(codes: ir.TensorProtocol, scales: ir.TensorProtocol, block: int, axis: int) -> _ByChannel:
    """Codes with block scales along ``axis`` -> codes with one scale along it, and these scales in the same type."""
    values, steps = (np.moveaxis(np.asarray(tensor.numpy()), axis, -2) for tensor in (codes, scales))
    new_codes = np.empty_like(values)
    new_scales = np.empty((*steps.shape[:-2], 1, steps.shape[-1]), steps.dtype)
    for first in range(0, values.shape[-1], _COLUMNS):
        part = slice(first, first + _COLUMNS)
        weight = values[..., part] * np.repeat(steps[..., part].astype(np.float32), block, axis=-2)
        largest = np.abs(weight).max(axis=-2, keepdims=True)
        new_scales[..., part] = np.where(largest, largest, 127) / 127
        new_codes[..., part] = np.rint(weight / new_scales[..., part].astype(np.float32)).clip(-127, 127)
    return np.ascontiguousarray(np.moveaxis(new_codes, -2, axis)), new_scales


def narrow_float4_scales(model: ir.Model) -> int:
    """Convert scales of float4 weights to the type of the activations, in place. Returns the number of changed weights.

    TensorRT does not take ``output_dtype`` of DequantizeLinear with float4 codes, which scales of another type need.
    """
    changed = 0
    for node in model.graph:
        if node.op_type != "DequantizeLinear" or "output_dtype" not in node.attributes:
            continue
        codes, scales = graphs.input_of(node, 0), graphs.input_of(node, 1)
        inner = scales.producer()
        if codes.dtype == ir.DataType.FLOAT4E2M1 and inner is not None:
            inner.attributes["output_dtype"] = node.attributes.pop("output_dtype")
            scales.dtype = ir.DataType(inner.attributes["output_dtype"].as_int())
            changed += 1
    return changed


def make_names_unique(model: ir.Model) -> None:
    """Rename nodes in place, so that their names cannot collide with layers that TensorRT's parser adds.

    It names the layers that it adds for a node ``NAME_7``, with one counter for all nodes, and refuses a node whose
    name is taken: with nodes ``a`` and ``a_7`` that depends on the number of layers before. After this pass, names are
    unique, and none ends in a number.
    """
    names = set[str]()
    for number, node in enumerate(graphs.all_nodes(model)):
        unique = f"{node.name}.{number}" if node.name in names else str(node.name)
        names.add(str(node.name))
        node.name = f"{unique}.{node.op_type}"


def _zero_points(node: ir.Node) -> ir.TensorProtocol | None:
    """Zero points of a constant weight, or None. UINT4 always has some: TensorRT does not read it."""
    codes, zero = node.inputs[0], node.inputs[2] if len(node.inputs) > 2 else None
    if codes is None or not codes.is_initializer():
        return None
    if zero is None and codes.dtype == ir.DataType.UINT4:
        return ir.tensor(np.zeros((), np.uint8), dtype=ir.DataType.UINT8)
    return None if zero is None else zero.const_value


def _turn(graph: ir.Graph, node: ir.Node) -> bool:
    """Negate the codes of groups with a negative scale, and set those with the scale 0 to the zero point.

    Returns whether there were any. ``(q - z) * s`` is ``(z - q) * -s``, and ``c - q`` is within the codes' type where c
    is the sum of its two ends. For int8 without zero points c is 0, and none are needed, unless there is a code -128.
    """
    codes, scales, zeros = node.inputs[0], node.inputs[1], _zero_points(node)
    stored, steps = (value.const_value if value is not None else None for value in (codes, scales))
    if codes is None or stored is None or steps is None or stored.dtype not in _MIDDLE:
        return False
    numbers = as_float32(steps)
    is_negative, is_zero = numbers < 0, numbers == 0
    dtype = node.outputs[0].dtype or steps.dtype
    # TensorRT-RTX 1.7 refuses int4 beside scales of another type than the weight's.
    if not (is_negative | is_zero).any() and (dtype == steps.dtype or stored.dtype != ir.DataType.INT4):
        return False
    axis, block = node.attributes.get_int("axis", 1), node.attributes.get_int("block_size", 0)
    if not block or is_negative.ndim != len(stored.shape):
        raise BuildError(f"{node.name}: TensorRT takes no negative scales, and turns codes in groups only")
    ends = 2 * _MIDDLE[stored.dtype] - 1
    plain = zeros is None and stored.dtype == ir.DataType.INT8
    if not is_negative.any() or (plain and bool((np.asarray(stored.numpy()) > -128).all())):
        ends = 0
    old = np.asarray(0 if zeros is None else zeros.numpy()).astype(np.int16)
    points = np.broadcast_to(np.where(is_negative, ends - old, old) if ends else old, is_negative.shape)

    def turned() -> npt.NDArray[Any]:
        integers = np.asarray(stored.numpy()).astype(np.int16)

        def spread(groups: npt.NDArray[Any]) -> npt.NDArray[Any]:
            return np.repeat(groups, block, axis=axis).take(range(integers.shape[axis]), axis)

        codes = np.where(spread(is_negative), ends - integers, np.where(spread(is_zero), spread(points), integers))
        return codes.astype(stored.dtype.numpy())

    new_codes = lazy(stored.dtype, stored.shape.numpy(), turned)
    node.replace_input_with(0, graphs.initializer(graph, f"{codes.name}.turned", new_codes))
    node.attributes.pop("output_dtype", None)
    positive = ir.Tensor(np.where(is_zero, 1, np.abs(numbers)).astype(dtype.numpy()), dtype=dtype)
    node.replace_input_with(1, graphs.initializer(graph, f"{codes.name}.positive_scales", positive))
    if ends:
        name, new = f"{codes.name}.turned_zero_points", points.astype(stored.dtype.numpy())
        node.resize_inputs(3)
        node.replace_input_with(2, graphs.initializer(graph, name, ir.Tensor(new, dtype=stored.dtype, name=name)))
    return True


def _move(graph: ir.Graph, node: ir.Node) -> None:
    codes, scales, zeros = node.inputs[0], node.inputs[1], _zero_points(node)
    readers = [use.node for use in node.outputs[0].uses()]
    if codes is None or codes.const_value is None or scales is None or scales.const_value is None or zeros is None:
        raise BuildError(f"{node.name}: TensorRT takes zero points of constant weights only")
    if any(reader.op_type != "MatMul" for reader in readers):
        raise BuildError(f"{node.name}: TensorRT takes zero points of MatMul only, not of {readers[0].op_type}")
    stored, steps, middle = codes.const_value, scales.const_value, _MIDDLE[codes.const_value.dtype]
    kind = ir.DataType.INT4 if stored.dtype.bitwidth == 4 else ir.DataType.INT8
    *experts, rows, columns = (int(size) for size in stored.shape.numpy())
    block = node.attributes.get_int("block_size", rows)

    def signed() -> npt.NDArray[Any]:
        return (np.asarray(stored.numpy()).astype(np.int16) - middle).astype(kind.numpy())

    dtype = node.outputs[0].dtype or steps.dtype

    def offsets(earlier: ir.TensorProtocol | None = None) -> npt.NDArray[Any]:
        weights = (middle - as_float32(zeros)) * as_float32(steps)
        weights = weights if earlier is None else weights + as_float32(earlier)
        return weights.reshape(*experts, -1, columns).astype(dtype.numpy())

    value = graphs.initializer(graph, f"{codes.name}.signed", lazy(kind, stored.shape.numpy(), signed))
    small = [*experts, -(-rows // block), columns]
    moved = graphs.initializer(graph, f"{codes.name}.offsets", lazy(dtype, small, offsets))
    node.replace_input_with(0, value)
    node.resize_inputs(2)
    for number, reader in enumerate(readers):
        added = added_to(reader)
        earlier = constant(added.product.inputs[1]) if added is not None else None
        if added is not None and earlier is not None and added.are_offsets(reader.inputs[0], rows, block):
            both = lazy(dtype, small, functools.partial(offsets, earlier))
            added.product.replace_input_with(1, graphs.initializer(graph, f"{codes.name}.{number}.offsets", both))
            continue
        shift = add_offsets(graph, reader, moved, rows, block, f"{codes.name}.{number}")
        shift.metadata_props.update(reader.metadata_props)  # Experts have a part for each of them in it too.
