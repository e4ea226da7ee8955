"""How much disk and memory an engine takes, as far as that is known before it is built."""

from __future__ import annotations

import onnx_ir as ir

from specbuild.engine.plan import EnginePlan
from specbuild.graph import ops as graphs
from specrun.engine_dir.config import GRAPH_NAME, WEIGHTS_NAME, GraphInfo

_OF_A_GRAPH = 300_000_000
"""Bytes that ONNX Runtime and probing take beside weights."""
_LAYOUTS = 2
"""TensorRT keeps weights twice where a profile is for one token of one row: see profiles in docs/gpu.md."""
_OF_TENSORRT = 3
"""TensorRT's builder has the weights in memory, and so is the plan."""


def weight_bytes(plan: EnginePlan) -> int:
    """About how large the engine's weights are. On the CPU those of 16 bits become float32."""
    if plan.build.tp_size > 1:
        return sum(weights for weights, _ in rank_bytes(plan))
    weights = plan.checkpoint.files[WEIGHTS_NAME].bytes
    if plan.build.multiple_profiles:
        weights *= _LAYOUTS
    if plan.device == "cuda" or plan.checkpoint.graph.dtype == "float32":
        return weights
    model = ir.load(plan.options.checkpoint_dir / GRAPH_NAME)
    stored = [value.const_value for value in model.graph.initializers.values()]
    return weights + sum(tensor.nbytes for tensor in stored if tensor is not None and tensor.dtype in graphs.HALF)


def rank_bytes(plan: EnginePlan) -> list[tuple[int, int]]:
    """Of each of several ranks: about how large its weights and its caches are."""
    graph = plan.checkpoint.graph
    return [
        (weights, _cache_bytes(plan, graph.model_copy(update={"caches": caches})))
        for weights, caches in plan.rank_sizes
    ]


def disk_bytes(plan: EnginePlan) -> int:
    """About how large the engine directory is."""
    others = sum(info.bytes for name, info in plan.checkpoint.files.items() if name != WEIGHTS_NAME)
    return weight_bytes(plan) + others


def disk_bytes_to_build(plan: EnginePlan) -> int:
    """About how much room building takes. On the CPU weights are laid out in a file first, and then in the engine's."""
    laid_out = weight_bytes(plan) if plan.backend == "onnxruntime" and plan.device == "cpu" else 0
    return disk_bytes(plan) + laid_out


def cache_bytes(plan: EnginePlan) -> int:
    """Of the keys and values of all rows at their longest, and of what recurrent layers keep of them."""
    if plan.build.tp_size > 1:
        return sum(caches for _, caches in rank_bytes(plan))
    return _cache_bytes(plan, plan.checkpoint.graph)


def _cache_bytes(plan: EnginePlan, graph: GraphInfo) -> int:
    graph = graph.with_replays(plan.build.max_draft_len)
    if plan.device == "cpu":
        bits = plan.build.value_bits(graph)
        graph = graph.model_copy(update={"dtype": "float32"})
        if bits:
            graph = graph.with_packed_cache(bits)
    rows = plan.build.max_batch_size
    return graph.cache_bytes(rows, plan.build.cache_length) + graph.state_bytes(rows, on_gpu=plan.device != "cpu")


def build_memory(plan: EnginePlan) -> int:
    """At most about how much memory building takes beyond Python and the compiler, by docs/benchmarks.md.

    For a CPU: that of running the engine for short texts. Kernels lay out quantized weights anew, in 8 bits at most.
    """
    if plan.backend.startswith("tensorrt"):
        return _OF_TENSORRT * weight_bytes(plan)
    if plan.device == "cuda":  # Files are copied.
        return _OF_A_GRAPH
    laid_out = plan.checkpoint.parameters if plan.checkpoint.graph.quantized else 0
    return weight_bytes(plan) + laid_out + _OF_A_GRAPH
