"""Quantised weights in the forms that TensorRT takes: its weights have no zero points.

``x @ ((q - z) * s)`` is ``x @ ((q - m) * s) + sums(x) @ ((m - z) * s)``, where m is the middle of the codes and sums
adds up the channels that share a scale. The first product keeps its packed weight, and the second is small.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from specbuild.quantisation.attach import block_sums
from specbuild.quantisation.packed import as_float32
from specrun.errors import BuildError

_MIDDLE = {ir.DataType.UINT4: 8, ir.DataType.UINT8: 128, ir.DataType.INT4: 0, ir.DataType.INT8: 0}
_SIGNED = {
    ir.DataType.UINT4: ir.DataType.INT4,
    ir.DataType.UINT8: ir.DataType.INT8,
    ir.DataType.INT4: ir.DataType.INT4,
    ir.DataType.INT8: ir.DataType.INT8,
}


def move_zero_points(model: ir.Model) -> int:
    """Rewrite the weights of ``model`` that have zero points, in place. Returns how many there were.

    New weights are tensors that are computed when they are read, and not in the files of ``model``.
    """
    weights = [node for node in model.graph if node.op_type == "DequantizeLinear" and _zero_points(node) is not None]
    for node in weights:
        _move(model.graph, node)
    RemoveUnusedNodesPass()(model)
    return len(weights)


def _zero_points(node: ir.Node) -> ir.TensorProtocol | None:
    """Those of a weight; None where it has none, or they are zero."""
    codes, zero = node.inputs[0], node.inputs[2] if len(node.inputs) > 2 else None
    if codes is None or not codes.is_initializer() or zero is None or zero.const_value is None:
        return None
    return zero.const_value


def _move(graph: ir.Graph, node: ir.Node) -> None:
    codes, scales, zeros = node.inputs[0], node.inputs[1], _zero_points(node)
    readers = [use.node for use in node.outputs[0].uses()]
    if codes is None or codes.const_value is None or scales is None or scales.const_value is None or zeros is None:
        raise BuildError(f"{node.name}: TensorRT takes zero points of constant weights only")
    if any(reader.op_type != "MatMul" for reader in readers):
        raise BuildError(f"{node.name}: TensorRT takes zero points of products only, not of {readers[0].op_type}")
    stored, steps, middle = codes.const_value, scales.const_value, _MIDDLE[codes.const_value.dtype]
    kind = _SIGNED[stored.dtype]
    rows, columns = (int(size) for size in stored.shape.numpy())
    block = node.attributes["block_size"].as_int() if "block_size" in node.attributes else rows

    def signed() -> ir.TensorProtocol:
        moved = np.asarray(stored.numpy()).astype(np.int16) - middle
        return ir.Tensor(moved.astype(kind.numpy()), dtype=kind)

    def offsets() -> ir.TensorProtocol:
        found = (middle - as_float32(zeros)) * as_float32(steps)
        return ir.Tensor(found.reshape(-1, columns).astype(steps.dtype.numpy()))

    shape = ir.Shape([rows, columns])
    value = _initializer(graph, f"{codes.name}.signed", ir.LazyTensor(signed, kind, shape))
    small = ir.Shape([-(-rows // block), columns])
    moved = _initializer(graph, f"{codes.name}.offsets", ir.LazyTensor(offsets, steps.dtype, small))
    adder = _block_sums(graph, rows, block, steps.dtype)
    node.replace_input_with(0, value)
    node.resize_inputs(2)
    for number, reader in enumerate(readers):
        name = f"{codes.name}.{number}"
        sums = ir.node("MatMul", [reader.inputs[0], adder], name=f"{name}.sums")
        shift = ir.node("MatMul", [sums.outputs[0], moved], name=f"{name}.shift")
        total = ir.node("Add", [reader.outputs[0], shift.outputs[0]], name=f"{name}.total")
        later = [use for use in reader.outputs[0].uses() if use.node is not total]
        for made in (sums, shift, total):
            made.outputs[0].name, made.outputs[0].type = made.name, reader.outputs[0].type
        graph.insert_after(reader, [sums, shift, total])
        for use in later:
            use.node.replace_input_with(use.idx, total.outputs[0])


def _block_sums(graph: ir.Graph, inputs: int, block: int, dtype: ir.DataType) -> ir.Value:
    name = f"quantisation.blocks.{inputs}.{block}"
    if name in graph.initializers:
        return graph.initializers[name]
    array: npt.NDArray[np.generic] = block_sums(inputs, block).astype(dtype.numpy())
    return _initializer(graph, name, ir.Tensor(array))


def _initializer(graph: ir.Graph, name: str, tensor: ir.TensorProtocol) -> ir.Value:
    shape = ir.Shape(list(tensor.shape.numpy()))
    value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=shape, const_value=tensor)
    graph.initializers[name] = value
    return value
