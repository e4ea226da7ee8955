"""``specbuild engine --dry_run``: what would be built, and what that takes, as far as it is known."""

from __future__ import annotations

from specbuild.artifacts.inspect import facts_table, sizes
from specbuild.engine.plan import EnginePlan
from specbuild.engine.size import build_memory, cache_bytes, disk_bytes, disk_bytes_to_build, rank_bytes, weight_bytes
from specbuild.files import free_bytes, say_free_memory
from specrun.command_line import human_bytes

_COMPILES = {
    "onnxruntime": "writing the weights; for a CPU also about a hundred passes of the engine, to compare their bits",
    "tensorrt": "TensorRT's builder, which times kernels for every profile",
    "tensorrt_rtx": "TensorRT-RTX's builder, once for all compute capabilities; kernels are compiled when it is run",
    "cuda": "laying out and writing the weights; kernels are compiled when it is run",
}
"""Slowest part of a build, by backend. Its time depends on the machine and is not estimated."""


def describe_plan(plan: EnginePlan) -> str:
    """A page for people. Nothing is written."""
    build, options = plan.build, plan.options
    profiles = build.profiles if plan.backend.startswith("tensorrt") else []
    facts = {
        "engine": str(options.output_dir),
        "would be": "left as it is: it is up to date" if plan.is_there else "built",
        "backend": f"{plan.backend} {plan.provenance.versions[plan.backend]} for {_device(plan)}: {plan.reason}",
        "speculative_decoding_mode": build.speculative_decoding_mode,
        "max_draft_len": str(build.max_draft_len),
        "max_batch_size": str(build.max_batch_size),
        "max_input_len": str(build.max_input_len),
        "max_seq_len": str(build.max_seq_len),
        "S_max": f"{build.cache_length} positions of a row in the cache",
        **{f"profile {number}": f"{profile.name}, {sizes(profile)}" for number, profile in enumerate(profiles)},
        "disk": f"about {human_bytes(disk_bytes(plan))}, and {human_bytes(disk_bytes_to_build(plan))} to build; "
        f"{human_bytes(free_bytes(options.output_dir))} are free",
        "memory to build": f"up to about {human_bytes(build_memory(plan))}{say_free_memory()}",
        "memory to run": f"{human_bytes(weight_bytes(plan))} weights, {human_bytes(cache_bytes(plan))} KV cache for "
        f"{build.max_batch_size} rows at their longest; in addition the prefix cache and what is computed in",
        **_ranks(plan),
        "time": f"not known before it was tried; it goes into {_COMPILES[plan.backend]}",
        **{f"note {number}": note for number, note in enumerate(plan.notes, 1)},
    }
    return facts_table(facts)


def _ranks(plan: EnginePlan) -> dict[str, str]:
    if plan.build.tp_size == 1:
        return {}
    return {
        f"rank {rank}": f"{human_bytes(weights)} weights, {human_bytes(caches)} KV cache"
        for rank, (weights, caches) in enumerate(rank_bytes(plan))
    }


def _device(plan: EnginePlan) -> str:
    if plan.device == "cpu":
        return "the CPU"
    named = ", ".join(f"{number // 10}.{number % 10}" for number in plan.options.compute_capabilities)
    return f"compute capabilities {named}" if named else (plan.options.device or "cuda")
