"""Engines of several ranks: a checkpoint for each, which is compiled like any other."""

from __future__ import annotations

import shutil
from pathlib import Path

import onnx_ir as ir

from specbuild.compilers import Compiled
from specbuild.engine.plan import EnginePlan
from specbuild.graph import ops as graphs
from specbuild.progress import Advance
from specbuild.sharding.shard import shard
from specrun.engine_dir.cache_tensors import CacheTensor
from specrun.engine_dir.config import GRAPH_NAME, PLAN_NAME, engine_files


def compile_ranks(plan: EnginePlan, work: Path, advance: Advance) -> Compiled:
    """Compile what each rank computes, into ``work``. Raises SpecError."""
    ranks, made = plan.build.tp_size, list[Compiled]()
    for rank in range(ranks):
        own, output = work / f"rank{rank}.checkpoint", work / f"rank{rank}"
        own.mkdir()
        output.mkdir()
        model = shard_of(plan, rank)
        caches = caches_of(model)
        graphs.save(model, own / GRAPH_NAME)
        graph = plan.checkpoint.graph.model_copy(update={"caches": caches})
        made.append(plan.compiler(own, graph, plan.build, output, lambda part: advance(part / ranks)))
        shutil.rmtree(own)
        if (output / PLAN_NAME).exists():
            (output / PLAN_NAME).replace(work / f"rank{rank}.engine")
            output.rmdir()
    first = made[0]
    graph = first.graph.model_copy(
        update={"caches": plan.checkpoint.graph.caches, "ranks": [compiled.graph.caches for compiled in made]}
    )
    files = engine_files(first.backend.name, ranks)
    if first.backend.name == "onnxruntime":
        files = [f"rank{rank}/{name}" for rank, compiled in enumerate(made) for name in compiled.files]
    return Compiled(first.backend, graph, first.io, files, first.notes)


def shard_of(plan: EnginePlan, rank: int) -> ir.Model:
    """The checkpoint's graph as one rank computes it; its weights are not read yet. Raises BuildConfigError."""
    model = ir.load(plan.options.checkpoint_dir / GRAPH_NAME)
    shard(model, rank, plan.build.tp_size)
    return model


def caches_of(model: ir.Model) -> list[CacheTensor]:
    """What a rank has of keys and values."""
    names = [value for value in model.graph.inputs if str(value.name).startswith("past_key_values.")]
    shapes = [value.shape for value in names if value.shape is not None and value.name != "past_key_values.features"]
    return [CacheTensor(heads=int(shape[1]), head_dim=int(shape[3])) for shape in shapes]  # type: ignore[arg-type]
