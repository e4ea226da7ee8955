"""Attention that computes one query as it computes several.

ONNX Runtime's CPU kernels multiply a single row another way than two or more, so a token that is fed alone gets other
bits than the same token in a verify pass. Of a model's products only those inside attention do that: they have one row
for every token. A second query, thrown away afterwards, keeps them from it. A second token would cost more: a row in
every product with the weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from specbuild.graph import ops as graphs
from specrun.engine_dir.contract import INPUT_IDS

_PREFIX = "single_query"
_QUERY, _MASK = 0, 3
"""Inputs of Attention: queries [B, H, S, D], and which keys they see, bool [B, 1, S, S_max]."""


def pad_single_queries(model: ir.Model) -> int:
    """Let every Attention of ``model`` have two queries where there is one. Returns how many were changed.

    Attention that counts positions by itself (``is_causal``) or has outputs beside its own stays as it is.
    """
    graph = model.graph
    nodes = [node for node in graph if node.op_type == "Attention" and _is_plain(node)]
    if not nodes:
        return 0
    constants = {"one": [1], "zero": [0], "axis": [2], "seen": True}
    one, zero, axis, seen = (
        graphs.initializer(graph, f"{_PREFIX}.{name}", ir.tensor(np.array(value), name=f"{_PREFIX}.{name}"))
        for name, value in constants.items()
    )
    input_ids = next(value for value in graph.inputs if value.name == INPUT_IDS)
    length = _node("Shape", [input_ids], "length", {"start": 1, "end": 2})
    is_single = _node("Equal", [length.outputs[0], one], "is_single")
    lacking = _node("Cast", [is_single.outputs[0]], "lacking", {"to": int(ir.DataType.INT64)})
    pads = _node("Concat", [zero, lacking.outputs[0]], "pads", {"axis": 0})
    graph.insert_before(next(iter(graph)), [length, is_single, lacking, pads])
    padded: dict[ir.Value, ir.Value] = {}
    for number, node in enumerate(nodes):
        for place in (_QUERY, _MASK):
            value = node.inputs[place] if place < len(node.inputs) else None
            if value is None:
                continue
            if value not in padded:
                # A query of zeros that sees every key.
                filler = seen if place == _MASK else None
                pad = _node("Pad", [value, pads.outputs[0], filler, axis], f"pad.{number}.{place}")
                graph.insert_before(node, pad)
                padded[value] = pad.outputs[0]
            node.replace_input_with(place, padded[value])
        output = node.outputs[0]
        readers = list(output.uses())
        own = _node("Slice", [output, zero, length.outputs[0], axis], f"own.{number}")
        graph.insert_after(node, own)
        for use in readers:
            use.node.replace_input_with(use.idx, own.outputs[0])
    return len(nodes)


def _is_plain(node: ir.Node) -> bool:
    causal = node.attributes.get("is_causal")
    others = [output for output in node.outputs[1:] if output.uses() or output.is_graph_output()]
    return not others and not (causal is not None and causal.as_int())


def _node(
    operator: str, inputs: Sequence[ir.Value | None], name: str, attributes: dict[str, int] | None = None
) -> ir.Node:
    node = ir.node(operator, inputs, attributes or {})
    node.name = node.outputs[0].name = f"{_PREFIX}.{name}"
    return node
