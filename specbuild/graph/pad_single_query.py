"""Attention that computes one query as it computes several.

ONNX Runtime's CPU kernels multiply a single row another way than two or more, so a token that is fed alone gets other
bits than the same token in a verify pass. Of a model's products only those inside attention do that: they have one row
for every token. A second query, thrown away afterwards, keeps them from it. A second token would cost more: a row in
every product with the weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy.typing as npt
import onnx_ir as ir

from specbuild.graph import ops as graphs
from specbuild.graph.attention_layers import attention_layers
from specrun.engine_dir.contract import INPUT_IDS

_PREFIX = "single_query"


def pad_single_queries(model: ir.Model) -> int:
    """Let every Attention under a mask have two queries where there is one, in place. Returns how many were changed."""
    graph = model.graph
    layers = [layer for layer in attention_layers(model) if layer.node.op_type == "Attention"]
    if not layers:
        return 0
    constants: dict[str, npt.ArrayLike] = {"one": [1], "zero": [0], "axis": [2], "seen": True}
    one, zero, axis, seen = (graphs.constant(graph, f"{_PREFIX}.{name}", value) for name, value in constants.items())
    input_ids = next(value for value in graph.inputs if value.name == INPUT_IDS)
    length = _node("Shape", [input_ids], "length", {"start": 1, "end": 2})
    is_single = _node("Equal", [length.outputs[0], one], "is_single")
    lacking = _node("Cast", [is_single.outputs[0]], "lacking", {"to": int(ir.DataType.INT64)})
    pads = _node("Concat", [zero, lacking.outputs[0]], "pads", {"axis": 0})
    graph.insert_before(next(iter(graph)), [length, is_single, lacking, pads])
    padded: dict[ir.Value, ir.Value] = {}
    for number, layer in enumerate(layers):
        for value, filler in ((layer.query, None), (layer.mask, seen)):  # A query of zeros that sees every key.
            place = layer.node.inputs.index(value)
            if value not in padded:
                pad = _node("Pad", [value, pads.outputs[0], filler, axis], f"pad.{number}.{place}")
                graph.insert_before(layer.node, pad)
                padded[value] = pad.outputs[0]
            layer.node.replace_input_with(place, padded[value])
        output = layer.node.outputs[0]
        readers = list(output.uses())
        own = _node("Slice", [output, zero, length.outputs[0], axis], f"own.{number}")
        graph.insert_after(layer.node, own)
        for use in readers:
            use.node.replace_input_with(use.idx, own.outputs[0])
    return len(layers)


def _node(
    operator: str, inputs: Sequence[ir.Value | None], name: str, attributes: dict[str, int] | None = None
) -> ir.Node:
    node = ir.node(operator, inputs, attributes or {})
    node.name = node.outputs[0].name = f"{_PREFIX}.{name}"
    return node
