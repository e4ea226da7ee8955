"""How much disk and memory an engine takes, as far as that is known before it is built."""

from __future__ import annotations

import onnx_ir as ir

from specbuild import graph as graphs
from specbuild.engine_plan import EnginePlan
from specrun.engine_dir import GRAPH_NAME, WEIGHTS_NAME


def weight_bytes(plan: EnginePlan) -> int:
    """About how large the engine's weights are. On the CPU those of 16 bits become float32."""
    weights = plan.checkpoint.files[WEIGHTS_NAME].bytes
    if plan.device == "cuda" or plan.checkpoint.graph.dtype == "float32":
        return weights
    model = ir.load(plan.options.checkpoint_dir / GRAPH_NAME)
    stored = [value.const_value for value in model.graph.initializers.values()]
    return weights + sum(tensor.nbytes for tensor in stored if tensor is not None and tensor.dtype in graphs.HALF)


def disk_bytes(plan: EnginePlan) -> int:
    """About how large the engine directory is."""
    others = sum(info.bytes for name, info in plan.checkpoint.files.items() if name != WEIGHTS_NAME)
    return weight_bytes(plan) + others


def cache_bytes(plan: EnginePlan) -> int:
    """Of the keys and values of all rows at their longest."""
    graph = plan.checkpoint.graph
    if plan.device == "cpu":
        graph = graph.model_copy(update={"dtype": "float32"})
    return graph.cache_bytes(plan.build.max_batch_size, plan.build.cache_length)


def build_memory(plan: EnginePlan) -> str:
    """What building takes at least."""
    return "at least the weights"
