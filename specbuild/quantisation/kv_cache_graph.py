"""8-bit caches in a graph: QuantizeLinear -> TensorScatter into the cache -> DequantizeLinear, found and rewritten."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from specbuild import graph as graphs
from specbuild.quantisation.rounding import FLOAT8_MAX

INT8_MAX = 127


class CacheUpdate(NamedTuple):
    """The nodes that write new keys or values, and read all of them."""

    quantise: ir.Node
    scatter: ir.Node
    dequantise: list[ir.Node]


def cache_updates(model: ir.Model) -> list[CacheUpdate]:
    """Those of every tensor of an 8-bit cache; none where the cache is not rounded."""
    found = []
    for node in model.graph:
        producer = node.inputs[1].producer() if node.op_type == "TensorScatter" and node.inputs[1] else None
        if producer is not None and producer.op_type == "QuantizeLinear":
            readers = [use.node for use in node.outputs[0].uses() if use.node.op_type == "DequantizeLinear"]
            found.append(CacheUpdate(producer, node, readers))
    return found


def drop_cache_rounding(model: ir.Model) -> int:
    """Let keys and values pass unrounded, divided by their factors, in place. Returns how many tensors had rounding."""
    updates = cache_updates(model)
    for quantise, scatter, readers in updates:
        x, past, present = quantise.inputs[0], scatter.inputs[0], scatter.outputs[0]
        if x is None or past is None:
            raise ValueError(f"{scatter.name}: without inputs")
        scatter.replace_input_with(1, x)
        past.type = present.type = ir.TensorType(ir.DataType.FLOAT)
        for reader in readers:
            # Factors are divided in float32, whatever the model computes in.
            computed = reader.outputs[0].dtype or ir.DataType.FLOAT
            cast = ir.node("Cast", [present], {"to": int(computed)}, name=f"{reader.name}.unrounded")
            cast.outputs[0].name, cast.outputs[0].type = cast.name, ir.TensorType(computed)
            ir.convenience.replace_nodes_and_values(
                model.graph, reader, [reader], [cast], [reader.outputs[0]], [cast.outputs[0]]
            )
        if not quantise.outputs[0].uses():
            model.graph.remove(quantise, safe=True)
    return len(updates)


def store_float8_as_int8(model: ir.Model) -> int:
    """Let a cache of float8 be one of int8 with the same factors, in place. Returns how many tensors there were."""
    updates = [update for update in cache_updates(model) if _codes(update) == ir.DataType.FLOAT8E4M3FN]
    zero = ir.Tensor(np.zeros((), np.int8), name="kv_cache.zero_int8")
    for quantise, scatter, readers in updates:
        for node in (quantise, *readers):
            scale = node.inputs[1]
            if scale is None or scale.const_value is None:
                raise ValueError(f"{node.name}: without a constant scale")
            wider = np.asarray(scale.const_value.numpy() * np.float32(FLOAT8_MAX / INT8_MAX))
            name = f"{scale.name}.int8"
            node.replace_input_with(1, graphs.initializer(model.graph, name, ir.Tensor(wider, name=name)))
            node.replace_input_with(2, graphs.initializer(model.graph, str(zero.name), zero))
        for value in (quantise.outputs[0], scatter.inputs[0], scatter.outputs[0]):
            if value is not None:
                value.dtype = ir.DataType.INT8
    return len(updates)


def _codes(update: CacheUpdate) -> ir.DataType | None:
    zero = update.quantise.inputs[2]
    return zero.dtype if zero is not None else None
