"""Parts of constants: of weights in a file, and of the codes and scales that weights are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from specbuild.graph import ops as graphs
from specbuild.sharding.part import Part
from specbuild.weights.packed import lazy

WITH_OFFSETS = "WithOffsets"
"""A weight [K, N] with offsets [K / block, N]; see ``offsets``."""
Make = Callable[[ir.Node], ir.Value]
"""Adds a node to the graph; gives its output."""


def is_constant(value: ir.Value | None) -> bool:
    """Whether it is stored, or made of stored codes and scales; it may be transposed."""
    if value is None or value.const_value is not None:
        return value is not None
    node = value.producer()
    is_computed = node is not None and node.op_type in ("DequantizeLinear", "Transpose", WITH_OFFSETS)
    return is_computed and node is not None and all(map(is_constant, filter(None, node.inputs)))


def shape_of(value: ir.Value) -> tuple[int, ...]:
    """Of a constant."""
    if value.const_value is not None:
        return tuple(int(size) for size in value.const_value.shape.numpy())
    node = value.producer()
    assert node is not None and node.inputs[0] is not None
    shape = shape_of(node.inputs[0])
    order = _order(node)
    return tuple(shape[axis] for axis in order) if order else shape


def _order(node: ir.Node) -> tuple[int, ...]:
    return tuple(node.attributes["perm"].as_ints()) if node.op_type == "Transpose" else ()


def cut(value: ir.Value, part: Part, rank: int, make: Make) -> ir.Value:
    """What ``rank`` has of a constant; where its range reaches behind the end there are zeros. Raises MisalignedError.

    A constant without the axis, or with one element there, is whole.
    """
    shape = shape_of(value)
    if -part.axis > len(shape) or shape[part.axis] == 1:
        return value
    node = value.producer()
    if node is None:
        return _stored(value, part, rank)
    codes, *scales = node.inputs
    assert codes is not None
    if order := _order(node):
        local = cut(codes, part.at(order[part.axis] - len(order)), rank, make)
        return make(ir.Node("", "Transpose", [local], list(node.attributes.values()), num_outputs=1))
    if node.op_type == WITH_OFFSETS:
        return _with_offsets(node, part, rank, make)
    attributes = dict(node.attributes)
    axis = attributes["axis"].as_int() if "axis" in attributes else 1
    axis -= len(shape) if axis >= 0 else 0
    block = attributes["block_size"].as_int() if "block_size" in attributes else 0
    groups = part
    if block and axis == part.axis:  # A rank may have a part of a block.
        groups = part.covered_by(block, axis)
        first, last = part.ranges[rank]
        attributes["block_size"] = ir.AttrInt64("block_size", min(block, last - first))
    inputs: list[ir.Value | None] = [cut(codes, part, rank, make)]
    for scale in scales:
        if scale is not None and len(shape_of(scale)) == 1 and len(shape) > 1:  # One for each element of an axis.
            inputs.append(cut(scale, part.at(-1), rank, make) if axis == part.axis else scale)
        else:
            inputs.append(cut(scale, groups, rank, make) if scale is not None else None)
    return make(ir.Node(node.domain, node.op_type, inputs, list(attributes.values()), num_outputs=1))


def _with_offsets(node: ir.Node, part: Part, rank: int, make: Make) -> ir.Value:
    weight, offsets = node.inputs
    assert weight is not None and offsets is not None
    block, groups = node.attributes.get_int("block_size", 0), part
    if part.axis == -2:
        groups = part.covered_by(block, -2)
        first, last = part.ranges[rank]
        block = min(block, last - first)
    local = [cut(weight, part, rank, make), cut(offsets, groups, rank, make)]
    value = make(ir.node(WITH_OFFSETS, local, {"block_size": block}))
    value.type = node.outputs[0].type
    return value


def _stored(value: ir.Value, part: Part, rank: int) -> ir.Value:
    tensor, (first, last) = value.const_value, part.ranges[rank]
    assert tensor is not None
    name, axis = f"{value.name}.{part.axis}.{first}.{last}", part.axis
    shape = [int(size) for size in tensor.shape.numpy()]
    size, axis = shape[axis], len(shape) + axis
    shape[axis] = last - first
    leading = all(count == 1 for count in shape[:axis])
    if isinstance(tensor, ir.ExternalTensor) and leading and last <= size and tensor.dtype.bitwidth >= 8:
        inner = int(np.prod(shape[axis + 1 :], dtype=np.int64))
        local: ir.TensorProtocol = graphs.part_of(tensor, first * inner, shape, name)
    else:

        def read() -> npt.NDArray[Any]:
            numbers = tensor.numpy()[(slice(None),) * axis + (slice(min(first, size), min(last, size)),)]
            missing = [(0, 0)] * numbers.ndim
            missing[axis] = (0, shape[axis] - numbers.shape[axis])
            return np.pad(numbers, missing)

        local = lazy(tensor.dtype, shape, read, name)
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(local.dtype), const_value=local)
