"""How a part of a node's output is computed: of which parts of its inputs. One function for each kind of operator."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from specbuild.sharding.part import MisalignedError, Part, source_of
from specbuild.sharding.parts import Parts, Rule
from specbuild.sharding.weights import is_constant, shape_of

_END = np.iinfo(np.int64).max


def elementwise(parts: Parts, node: ir.Node, output: int, part: Part) -> ir.Value | None:
    """Inputs are broadcast against each other."""
    inputs = [parts.operand(value, part) for value in node.inputs]
    return parts.like(node, inputs)[output]


def product(parts: Parts, node: ir.Node, output: int, part: Part) -> ir.Value | None:
    """MatMul. Columns of a weight are columns of the output."""
    x, weight = node.inputs
    if part.axis < -2:
        return elementwise(parts, node, output, part)
    if part.axis == -2:
        return parts.like(node, [parts.of(x, part), weight])[0]
    columns = parts.operand(weight, part)
    if is_constant(weight):
        parts.gains += 1
    return parts.like(node, [x, columns])[0]


def normalization(parts: Parts, node: ir.Node, output: int, part: Part) -> ir.Value | None:
    """RMSNormalization, LayerNormalization, Softmax: computed over the last axes."""
    axis = parts.axis(node, node.inputs[0], -1)
    if axis is None or (part.axis == axis if node.op_type == "Softmax" else part.axis >= axis):
        return None
    return elementwise(parts, node, output, part)


def reduction(parts: Parts, node: ir.Node, output: int, part: Part) -> ir.Value | None:
    """ReduceSum, ReduceMean, ReduceMax over other axes."""
    axes, shape = parts.integers(node.inputs[1] if len(node.inputs) > 1 else None), parts.shape(node.inputs[0])
    if axes is None or shape is None or None in axes:
        return None
    reduced = [axis - len(shape) if axis >= 0 else axis for axis in axes if axis is not None]
    input_axis = part.axis
    if not node.attributes.get_int("keepdims", 1):
        left = [axis for axis in range(-len(shape), 0) if axis not in reduced]
        input_axis = left[part.axis]
    if input_axis in reduced:
        return None
    return parts.like(node, [parts.of(node.inputs[0], part.at(input_axis)), *node.inputs[1:]])[output]


def transpose(parts: Parts, node: ir.Node, output: int, part: Part) -> ir.Value | None:
    """The axis goes to another place."""
    order = node.attributes["perm"].as_ints()
    return parts.like(node, [parts.of(node.inputs[0], part.at(order[part.axis] - len(order)))])[output]


def reshape(parts: Parts, node: ir.Node, output: int, part: Part) -> ir.Value | None:
    """The axis may be split into several, merged of several, or stay."""
    x, target = node.inputs
    sizes, held = parts.sizes(target), parts.shape(x)
    source = source_of(part, sizes, held) if sizes and held else None
    if sizes is None or source is None:
        return None
    source_part, whole = source
    shape = parts.resized(target, len(sizes) + part.axis, parts.length(whole))
    result = parts.like(node, [parts.of(x, source_part), shape])[output]
    if whole.ranges == part.ranges:
        return result
    start = part.ranges[parts.rank][0] - whole.ranges[parts.rank][0]
    return parts.slice(result, part.axis, start, start + parts.length(part))


def expand(parts: Parts, node: ir.Node, output: int, part: Part) -> ir.Value | None:
    """One element is repeated, or the axis stays."""
    x, target = node.inputs
    sizes = parts.sizes(target)
    if sizes is None or -part.axis > len(sizes):
        return None
    index = len(sizes) + part.axis
    if sizes[index] == 1:
        return parts.like(node, [parts.of(x, part), target])[output]
    return parts.like(node, [parts.operand(x, part), parts.resized(target, index, parts.length(part))])[output]


def filled(parts: Parts, node: ir.Node, output: int, part: Part) -> ir.Value | None:
    """ConstantOfShape."""
    sizes = parts.sizes(node.inputs[0])
    if sizes is None:
        return None
    target = parts.resized(node.inputs[0], len(sizes) + part.axis, parts.length(part))
    return parts.like(node, [target])[output]


def unsqueeze(parts: Parts, node: ir.Node, output: int, part: Part) -> ir.Value | None:
    """Other axes are added."""
    axes, shape = parts.integers(node.inputs[1]), parts.shape(node.inputs[0])
    if axes is None or shape is None or None in axes:
        return None
    rank = len(shape) + len(axes)
    added = {axis % rank for axis in axes if axis is not None}
    kept = [axis for axis in range(rank) if axis not in added]
    input_axis = kept.index(rank + part.axis) - len(shape)
    return parts.like(node, [parts.of(node.inputs[0], part.at(input_axis)), node.inputs[1]])[output]


def squeeze(parts: Parts, node: ir.Node, output: int, part: Part) -> ir.Value | None:
    """Other axes vanish."""
    axes = parts.integers(node.inputs[1] if len(node.inputs) > 1 else None)
    shape = parts.shape(node.inputs[0])
    if axes is None or shape is None or None in axes:
        return None
    kept = [axis for axis in range(len(shape)) if axis not in {axis % len(shape) for axis in axes if axis is not None}]
    return parts.like(node, [parts.of(node.inputs[0], part.at(kept[part.axis] - len(shape))), node.inputs[1]])[output]


def split(parts: Parts, node: ir.Node, output: int, part: Part) -> ir.Value | None:
    """A part of one of the pieces is a part of the whole."""
    x = node.inputs[0]
    axis, shape = parts.axis(node, x, 0), parts.shape(x)
    if axis is None or shape is None:
        return None
    if axis != part.axis:
        return parts.like(node, [parts.of(x, part), *node.inputs[1:]])[output]
    size, pieces = shape[axis], parts.integers(node.inputs[1] if len(node.inputs) > 1 else None)
    if size is None:
        return None
    if pieces is None:
        each = -(-size // len(node.outputs))
        pieces = [each] * len(node.outputs)
    before = pieces[:output]
    return parts.of(x, part.shifted(sum(count or 0 for count in before), size))


def slice_(parts: Parts, node: ir.Node, output: int, part: Part) -> ir.Value | None:
    """A slice of another axis, or one that takes every n-th element of this one."""
    x = node.inputs[0]
    shape = parts.shape(x)
    given = [parts.integers(value) for value in node.inputs[1:]]
    if shape is None or len(given) < 3 or any(numbers is None or len(numbers) != 1 for numbers in given):
        return None
    start, _, axis, *steps = (numbers[0] for numbers in given if numbers)
    step = steps[0] if steps else 1
    if start is None or axis is None or step is None or start < 0 or step < 1:
        return None
    axis -= len(shape) if axis >= 0 else 0
    if axis != part.axis:
        return parts.like(node, [parts.of(x, part), *node.inputs[1:]])[output]
    size = shape[axis]
    if size is None:
        return None
    if step == 1:
        return parts.of(x, part.shifted(start, size))
    if start >= step:
        return None
    source_part = Part(part.axis, size, tuple((first * step, min(last * step, size)) for first, last in part.ranges))
    return parts.slice(parts.of(x, source_part), axis, start, _END, step)


def concat(parts: Parts, node: ir.Node, output: int, part: Part) -> ir.Value | None:
    """Of another axis."""
    axis = parts.axis(node, node.inputs[0], None)
    if axis is None or axis == part.axis:
        return None
    return parts.like(node, [parts.of(value, part) for value in node.inputs])[output]


def gather(parts: Parts, node: ir.Node, output: int, part: Part) -> ir.Value | None:
    """One element of another axis."""
    x, index = node.inputs
    axis, shape = parts.axis(node, x, 0), parts.shape(x)
    if axis is None or shape is None or not is_constant(index) or shape_of(index):  # type: ignore[arg-type]
        return None
    left = [other for other in range(-len(shape), 0) if other != axis]
    return parts.like(node, [parts.of(x, part.at(left[part.axis])), index])[output]


def scatter_nd(parts: Parts, node: ir.Node, output: int, part: Part) -> ir.Value | None:
    """Elements of the first axis are replaced."""
    data, indices, updates = node.inputs
    shape, index = parts.shape(data), parts.shape(indices)
    if shape is None or index is None or index[-1] != 1 or len(index) != 2 or part.axis == -len(shape):
        return None
    return parts.like(node, [parts.of(data, part), indices, parts.of(updates, part)])[output]


def tensor_scatter(parts: Parts, node: ir.Node, output: int, part: Part) -> ir.Value | None:
    """A cache is cut by its heads."""
    past, new, *indices = node.inputs
    axis = parts.axis(node, past, -2)
    return None if part.axis == axis else parts.like(node, [parts.of(past, part), parts.of(new, part), *indices])[0]


def attention(parts: Parts, node: ir.Node, output: int, part: Part) -> ir.Value | None:
    """By heads. Groups of heads share a key and a value."""
    query, key, value, *masks = node.inputs
    shape = parts.shape(key)
    heads = shape[-3] if shape and len(shape) == 4 else None
    if part.axis != -3 or heads is None or output:
        return None
    if part.size % heads:
        raise MisalignedError(1)
    kv_part = part.covered_by(part.size // heads, -3)
    inputs = [parts.of(query, part), parts.of(key, kv_part), parts.of(value, kv_part)]
    return parts.like(node, [*inputs, *(parts.operand(mask, part) for mask in masks)])[0]


def rotary(parts: Parts, node: ir.Node, output: int, part: Part) -> ir.Value | None:
    """Of [B, heads, S, D]."""
    if part.axis != -3:
        return None
    return parts.like(node, [parts.of(node.inputs[0], part), *node.inputs[1:]])[output]


def rounding(parts: Parts, node: ir.Node, output: int, part: Part) -> ir.Value | None:
    """QuantizeLinear and DequantizeLinear with one scale, or with one for each element of an axis."""
    x, *scales = node.inputs
    if node.attributes.get_int("block_size"):
        return None
    axis, inputs = parts.axis(node, x, 1), [parts.of(x, part)]
    for scale in scales:
        if not is_constant(scale):
            return None
        each = len(shape_of(scale)) == 1 and axis == part.axis  # type: ignore[arg-type]
        inputs.append(parts.operand(scale, part.at(-1)) if each else scale)  # type: ignore[arg-type]
    return parts.like(node, inputs)[output]


_ELEMENTWISE = (
    *("Add", "Sub", "Mul", "Div", "Pow", "Min", "Max", "Where", "And", "Or", "Not", "Equal", "Less", "LessOrEqual"),
    *("Greater", "GreaterOrEqual", "Mod", "Abs", "Neg", "Sqrt", "Reciprocal", "Exp", "Log", "Sin", "Cos", "Floor"),
    *("Sigmoid", "Tanh", "Relu", "Gelu", "Softplus", "Swish", "Erf", "Clip", "Cast", "Identity", "Round", "Sign"),
)
RULES: dict[str, Rule] = {
    **dict.fromkeys(_ELEMENTWISE, elementwise),
    "MatMul": product,
    **dict.fromkeys(("RMSNormalization", "LayerNormalization", "Softmax"), normalization),
    **dict.fromkeys(("ReduceSum", "ReduceMean", "ReduceMax"), reduction),
    **dict.fromkeys(("QuantizeLinear", "DequantizeLinear"), rounding),
    **{"Transpose": transpose, "Reshape": reshape, "Expand": expand, "ConstantOfShape": filled},
    **{"Unsqueeze": unsqueeze, "Squeeze": squeeze, "Split": split, "Slice": slice_, "Concat": concat},
    **{"Gather": gather, "ScatterND": scatter_nd, "TensorScatter": tensor_scatter},
    **{"Attention": attention, "RotaryEmbedding": rotary},
}
