"""Engines of several ranks: a checkpoint for each, which is compiled like any other."""

from __future__ import annotations

import shutil
from pathlib import Path

from specbuild.compilers import Compiled
from specbuild.engine.plan import EnginePlan, caches_of
from specbuild.graph import ops as graphs
from specbuild.progress import Advance
from specrun.engine_dir.cache_tensors import packed_caches
from specrun.engine_dir.config import GRAPH_NAME, PLAN_NAME, engine_files


def compile_ranks(plan: EnginePlan, work: Path, advance: Advance) -> Compiled:
    """Compile what each rank computes, into ``work``. Raises SpecError."""
    ranks, compiled_ranks = plan.build.tp_size, list[Compiled]()
    for rank in range(ranks):
        rank_dir, output = work / f"rank{rank}.checkpoint", work / f"rank{rank}"
        rank_dir.mkdir()
        output.mkdir()
        model = plan.shard(rank)
        caches = caches_of(model)
        graphs.save(model, rank_dir / GRAPH_NAME)
        graph = plan.checkpoint.graph.model_copy(update={"caches": caches})
        compiled_ranks.append(plan.compiler(rank_dir, graph, plan.build, output, lambda part: advance(part / ranks)))
        shutil.rmtree(rank_dir)
        if (output / PLAN_NAME).exists():
            (output / PLAN_NAME).replace(work / f"rank{rank}.engine")
            output.rmdir()
    first, caches = compiled_ranks[0], plan.checkpoint.graph.caches
    if bits := first.graph.value_bits:
        caches = packed_caches(caches, bits)
    graph = first.graph.model_copy(
        update={"caches": caches, "ranks": [compiled.graph.caches for compiled in compiled_ranks]}
    )
    files = engine_files(first.backend.name, ranks)
    if first.backend.name == "onnxruntime":
        files = [f"rank{rank}/{name}" for rank, compiled in enumerate(compiled_ranks) for name in compiled.files]
    return Compiled(first.backend, graph, first.io, files, first.notes)
