"""Quantised ONNX checkpoints, made of exported ones: by formats that engines have, and by one that none has."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx_ir as ir

from specbuild import graph as graphs
from specbuild.quantisation.attach import products
from specbuild.quantisation.dense import Ends, quantise
from specbuild.quantisation.recipe import QFormat, Recipe
from specrun.engine_dir import GRAPH_NAME
from tests.conftest import redescribe

_ENDS = Ends("model.embed_tokens", "lm_head", frozenset(), frozenset({"lm_head.weight"}))


def quantised(checkpoint: Path, output: Path, qformat: QFormat, group_size: int | None = None) -> Path:
    """``checkpoint`` with the weights of its products in ``qformat``."""
    model = ir.load(checkpoint / GRAPH_NAME)
    quantise(model, Recipe(qformat, group_size), _ENDS)
    return _save(model, checkpoint, output)


def with_one_scale(checkpoint: Path, output: Path) -> Path:
    """``checkpoint`` with one scale for all activations of a product: a row's logits depend on what is beside it."""
    model = ir.load(checkpoint / GRAPH_NAME)
    for product in products(model):
        weight = product.weight.const_value
        assert weight is not None
        dense = weight.numpy().astype(np.float32)
        dense = dense.T if product.transposed else dense
        steps = np.abs(dense).max(0) / np.float32(127)
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


def _constant(graph: ir.Graph, name: str, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> ir.Value:
    tensor = ir.tensor(array, name=name)
    value = ir.Value(name=name, const_value=tensor, shape=ir.Shape(array.shape), type=ir.TensorType(tensor.dtype))
    graph.register_initializer(value)
    return value


def _save(model: ir.Model, checkpoint: Path, output: Path) -> Path:
    shutil.copytree(checkpoint, output, ignore=shutil.ignore_patterns(f"{GRAPH_NAME}*"))
    graphs.save(model, output / GRAPH_NAME)
    return redescribe(output)
