"""Mixtures of experts whose used experts are copied before they are multiplied by.

CUDA graphs hold no branches that depend on the data, as ``used_experts`` makes them, and TensorRT takes no shapes that
do. A pass of T tokens, each of which chooses k of the E experts, uses N = min(T * k, E) of them at most, and N depends
on shapes alone. So N experts are gathered, the used ones among them, and only these are multiplied by. Where fewer are
used, the rest are experts that no token has chosen: they add 0.
"""

from __future__ import annotations

import onnx_ir as ir

from specbuild.graph import ops as graphs
from specbuild.graph.moe import Mixture, Tape, input_of, mixtures, replace, rewrite, stored_shape


def has_mixtures(model: ir.Model) -> bool:
    """Whether there are experts to gather."""
    return next(mixtures(model.graph), None) is not None


def gather_used_experts(model: ir.Model) -> int:
    """Let ``model`` multiply by as many experts as its tokens can use, in place. Returns how many mixtures there are.

    Quantized weights are gathered behind their DequantizeLinear: TensorRT makes one kernel of both, and refuses codes
    that anything else reads.
    """
    return rewrite(model, _gather)


def _gather(graph: ir.Graph, mixture: Mixture) -> None:
    made = Tape(f"{mixture.sum.name}.gathered")
    experts = _used_experts(made, mixture)
    results: dict[ir.Value | None, ir.Value] = {}
    for node in mixture.nodes:
        inputs = [results.get(value, value) for value in node.inputs]
        if graphs.EXPERTS in node.metadata_props:
            inputs[1] = made.op("Gather", input_of(node, 1), experts, axis=0)
        results.update(zip(node.outputs, made.copy(node, inputs), strict=True))
    total = made.copy(mixture.sum, [results[mixture.sum.inputs[0]], *mixture.sum.inputs[1:]])[0]
    replace(graph, mixture, made, total)


def _used_experts(made: Tape, mixture: Mixture) -> ir.Value:
    """int64 [N]: the experts that tokens have chosen, in order, and behind them others."""
    number = stored_shape(input_of(mixture.nodes[0], 1))[0]
    choices = made.op("Reshape", made.op("Size", _chosen(mixture)), made.numbers([1]))
    length = made.op("Min", choices, made.numbers([number]))
    used = made.op("Cast", made.op("Cast", mixture.routing, to=int(ir.DataType.BOOL)), to=int(ir.DataType.FLOAT))
    used = made.op("ReduceMax", used, made.numbers([1, 2]), keepdims=0)
    # No two are equal, since which of equal ones come first is the compiler's choice.
    order = made.numbers([1 - (expert + 1) / (number + 1) for expert in range(number)], ir.DataType.FLOAT)
    return made.add(ir.node("TopK", [made.op("Add", used, order), length], num_outputs=2))[1]


def _chosen(mixture: Mixture) -> ir.Value:
    """int64 [T, k]: the experts of each token, by which ``export.experts`` scatters their weights."""
    node = mixture.routing.producer()
    while node is not None and node.op_type != "ScatterElements":
        node = input_of(node, 0).producer()
    if node is None:
        raise ValueError(f"{mixture.sum.name}: the routing is not scattered")
    return input_of(node, 1)
