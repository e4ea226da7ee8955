"""Quantized ONNX checkpoints, made of exported ones: by formats that engines have, and by one that none has."""

from __future__ import annotations

import shutil
from pathlib import Path

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from specbuild.graph import ops as graphs
from specbuild.quantization.insert_qdq import WeightedMatMul, quantize_embedding, quantize_matmul, weighted_matmuls
from specbuild.weights.packed import Activation, Floats, Packed
from specrun.engine_dir.config import GRAPH_NAME
from tests.helpers.engines import redescribe

BLOCK = 128


def quantized(checkpoint: Path, output: Path, form: str, largest_block: int = BLOCK, embedding: bool = False) -> Path:
    """``checkpoint`` in ``int8`` (a scale an output channel, and one a token), or in blocks of ``int4``.

    embedding: in 8 bits, a scale a token.
    """
    model = ir.load(checkpoint / GRAPH_NAME)
    if embedding:
        lookup = next(node for node in model.graph if node.op_type == "Gather" and "embed" in str(node.inputs[0]))
        assert lookup.inputs[0] is not None and lookup.inputs[0].const_value is not None
        table = np.array(lookup.inputs[0].const_value.numpy())
        steps = _steps(table.T, 127)
        codes = np.rint(table / steps[:, None]).astype(np.int8)
        quantize_embedding(model, lookup, Packed(ir.tensor(codes), ir.tensor(steps), axis=0))
    for product in weighted_matmuls(model):
        quantize_matmul(model, product, _int8(product) if form == "int8" else _int4(product, largest_block))
    return _save(model, checkpoint, output)


def _int8(product: WeightedMatMul) -> Packed:
    weight = _dense(product)
    steps = _steps(weight, 127)
    codes = np.rint(weight / steps).astype(np.int8)
    return Packed(ir.tensor(codes), ir.tensor(steps), activation=Activation("int8"))


def _int4(product: WeightedMatMul, largest_block: int) -> Packed:
    weight = _dense(product)
    block = min(largest_block, len(weight) & -len(weight))
    groups = weight.reshape(-1, block, weight.shape[1])
    steps = _steps(groups.swapaxes(0, 1), 7)
    codes = np.rint(groups / steps[:, None]).reshape(weight.shape).astype(ml_dtypes.int4)
    return Packed(ir.tensor(codes), ir.tensor(steps), block=block)


def _steps(weight: Floats, codes: int) -> Floats:
    """The size of a step for each column [K, ..]: the largest value has the last of ``codes``."""
    largest: Floats = np.abs(weight).max(0)
    return np.where(largest > 0, largest / np.float32(codes), np.float32(1))


def _dense(product: WeightedMatMul) -> Floats:
    """The weight [K, N]. Its own tensor may be a view of a file, so it is copied."""
    assert product.weight.const_value is not None
    weight = np.array(product.weight.const_value.numpy(), np.float32)
    return weight.T if product.transposed else weight


def with_one_scale(checkpoint: Path, output: Path) -> Path:
    """``checkpoint`` with one scale for all activations of a product: a row's logits depend on what is beside it."""
    model = ir.load(checkpoint / GRAPH_NAME)
    for product in weighted_matmuls(model):
        dense = _dense(product)
        steps = _steps(dense, 127)
        constants = {"codes": np.rint(dense / steps).astype(np.int8), "steps": steps}
        codes, scales = (_constant(model.graph, f"{product.node.name}.{name}", a) for name, a in constants.items())
        rounded = ir.node("DynamicQuantizeLinear", product.node.inputs[:1], num_outputs=3)
        total = ir.node("MatMulInteger", [rounded.outputs[0], codes, rounded.outputs[2]])
        wide = ir.node("Cast", [total.outputs[0]], {"to": int(ir.DataType.FLOAT)})
        scale = ir.node("Mul", [rounded.outputs[1], scales])
        nodes = [rounded, total, wide, scale, ir.node("Mul", [wide.outputs[0], scale.outputs[0]])]
        old = product.node.outputs[0]
        ir.convenience.replace_nodes_and_values(
            model.graph, product.node, [product.node], nodes, [old], [nodes[-1].outputs[0]]
        )
    return _save(model, checkpoint, output)


def _constant(graph: ir.Graph, name: str, array: npt.NDArray[np.generic]) -> ir.Value:
    tensor = ir.tensor(array, name=name)
    value = ir.Value(name=name, const_value=tensor, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype))
    graph.register_initializer(value)
    return value


def _save(model: ir.Model, checkpoint: Path, output: Path) -> Path:
    shutil.copytree(checkpoint, output, ignore=shutil.ignore_patterns(f"{GRAPH_NAME}*"))
    graphs.save(model, output / GRAPH_NAME)
    return redescribe(output)
