"""Parts of weights that lie in a file, dense or as codes: each as a weight of its own, without reading it."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from specbuild.graph import ops as graphs


def stored_tensor(value: ir.Value | None) -> ir.ExternalTensor | None:
    """The tensor in the file that ``value`` is, or that its numbers are made of; None where there is none."""
    node = value.producer() if value is not None else None
    if node is not None:
        return stored_tensor(node.inputs[0]) if node.op_type == "DequantizeLinear" else None
    tensor = value.const_value if value is not None and value.is_initializer() else None
    return tensor if isinstance(tensor, ir.ExternalTensor) else None


def block_size(value: ir.Value) -> int | None:
    """How many rows of codes share a scale; None where they all do, or there are no codes."""
    node = value.producer()
    return node.attributes.get_int("block_size") if node is not None else None


class StoredPart(NamedTuple):
    """Rows of a matrix [K, N], or of one expert's of [E, K, N]."""

    expert: int | None
    first: int
    last: int

    def of(self, value: ir.Value, nodes: list[ir.Node], row: bool = False) -> ir.Value:
        """The part of a stored weight; ``nodes`` gets what makes numbers of codes. row: of [1, N] take [N]."""
        node = value.producer()
        if node is None:
            return self._stored(value, row)
        block, attributes = block_size(value), dict(node.attributes)
        codes, *scales = (given for given in node.inputs if given is not None)
        inputs = [self.of(codes, nodes, row)]
        if self.expert is None and _is_table(node):  # Each row has its scales.
            inputs += [self._rows(scale) for scale in scales]
        elif block is None:  # One scale a channel or matrix; of stacked experts each has one.
            inputs += [scale if self.expert is None else self.of(scale, nodes) for scale in scales]
            if self.expert is not None:
                attributes.pop("axis", None)
        else:
            tensor = scales[0] if (producer := scales[0].producer()) is None else producer.inputs[0]
            assert tensor is not None and tensor.const_value is not None
            is_row = int(tensor.const_value.shape.numpy()[-2]) == 1
            groups = self._replace(first=self.first // block, last=-(-self.last // block))
            inputs += [groups.of(scale, nodes, row=is_row) for scale in scales]
            attributes["axis"] = ir.AttrInt64("axis", 1 if is_row else 0)
            if is_row:  # A scale for each channel.
                del attributes["block_size"]
        sliced = ir.Node(node.domain, node.op_type, inputs, list(attributes.values()), num_outputs=1)
        nodes.append(sliced)
        return sliced.outputs[0]

    def _stored(self, value: ir.Value, row: bool) -> ir.Value:
        assert value.const_value is not None
        *_, rows, columns = sizes = (1, *(int(size) for size in value.const_value.shape.numpy()))
        if len(sizes) == 2:  # A number of each expert.
            return _part(value, self.expert or 0, [], f"{value.name}.{self.expert}.{self.first}")
        first = ((self.expert or 0) * rows + self.first) * columns
        shape = [columns] if row else [self.last - self.first, columns]
        return _part(value, first, shape, f"{value.name}.{self.expert or 0}.rows.{self.first}")

    def _rows(self, value: ir.Value) -> ir.Value:
        assert value.const_value is not None
        _, *others = (int(size) for size in value.const_value.shape.numpy())
        size, count = math.prod(others), self.last - self.first
        return _part(value, self.first * size, [count, *others], f"{value.name}.rows.{self.first}")


def _is_table(node: ir.Node) -> bool:
    """Whether a matrix's output channels are its rows, [N, K], as those of an embedding that is tied to the head."""
    axis, scales = node.attributes.get_int("axis", 1) % 2, node.inputs[1]
    axes = len(scales.shape) if scales is not None and scales.shape is not None else 0
    return (axis, axes) == (1, 2) if block_size(node.outputs[0]) else (axis, axes) == (0, 1)


def _part(value: ir.Value, first: int, shape: list[int], name: str) -> ir.Value:
    """Elements from number ``first`` on. What is small is not in the file, and copied."""
    stored = value.const_value
    assert stored is not None
    part: ir.TensorProtocol
    if isinstance(stored, ir.ExternalTensor):
        part = graphs.part_of(stored, first, shape, name)
    else:
        numbers = np.asarray(stored.numpy()).reshape(-1)[first : first + math.prod(shape)]
        part = ir.Tensor(numbers.reshape(shape), dtype=stored.dtype, name=name)
    return ir.Value(name=name, shape=ir.Shape(shape), type=ir.TensorType(part.dtype), const_value=part)
