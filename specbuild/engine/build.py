"""``specbuild engine``: ONNX checkpoint directory -> engine directory."""

from __future__ import annotations

import shutil
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from specbuild.artifacts.provenance import made_before, require_same
from specbuild.compilers import choose
from specbuild.engine.config import EngineOptions
from specbuild.engine.plan import EnginePlan, plan_engine
from specbuild.engine.shards import compile_ranks
from specbuild.engine.size import disk_bytes, disk_bytes_to_build
from specbuild.engine.workers import run_side_by_side
from specbuild.files import require_space
from specbuild.progress import Advance, Stages
from specrun.backends import open_host_backend
from specrun.backends.bit_exact_probe import shapes_agree
from specrun.backends.known_here import describe_runtime
from specrun.backends.pass_timing import time_passes
from specrun.command_line import human_bytes
from specrun.engine_dir.config import CONFIG_NAME, EngineConfig, describe_file, read_config
from specrun.engine_dir.contract import MARKOV_FILES
from specrun.engine_dir.directories import new_directory, require_free
from specrun.errors import BuildConfigError, BuildError, CheckpointError, EngineDirError
from specrun.optional_packages import import_package
from specrun.text.tokenizer import require_own_tokenizer, tokenizer_files


def build_engine(options: EngineOptions, *, force: bool = False, stages: Stages | None = None) -> EngineConfig:
    """Build one engine directory, and describe it. One that is there and would be the same is left as it is.

    force: replace another one. stages: shows progress; None: on standard error. Raises SpecError, and OSError for a
    full disk.
    """
    build_engines([options], 1, force, stages or Stages())
    return read_config(options.output_dir, EngineConfig, EngineDirError, "specbuild engine")


def build_engines(engines: list[EngineOptions], workers: int, force: bool, stages: Stages) -> None:
    """Build the engines that are not there yet, ``workers`` at a time. Raises SpecError.

    All settings are checked before the first build.
    """
    missing = [plan.options for plan in plan_engines(engines, force, stages) if not plan.is_there]
    build = partial(_build_one, force=force)
    if workers == 1 or len(missing) <= 1:
        for options in missing:
            with stages.stage(f"build {options.output_dir}", 1.0) as advance:
                summary = build(options, advance=advance)
            stages.say(summary)
        return
    with stages.stage(f"build {len(missing)} engines", len(missing)) as advance:
        load = partial(_load_compilers, missing)
        summaries = run_side_by_side(build, missing, workers, advance, load)
    for summary in summaries:
        stages.say(summary)


def plan_engines(engines: list[EngineOptions], force: bool, stages: Stages) -> list[EnginePlan]:
    """Check everything that is known before a build, and say what is to be known of each. Raises SpecError, OSError."""
    plans = [plan_engine(options) for options in engines]
    for plan in plans:
        output, checkpoint = plan.options.output_dir, plan.options.checkpoint_dir
        if output.resolve() == checkpoint.resolve():
            raise BuildConfigError(f"{output}: is the checkpoint itself; choose another --output_dir")
        if not force and (earlier := made_before(output, EngineConfig)):
            require_same(output, earlier, plan.provenance)
            stages.say(f"{output} is up to date")
            plan.is_there = True
            continue
        require_free(output, force)
        stages.say(f"{output}: backend {plan.backend}: {plan.reason}")
        for note in plan.notes:
            stages.say(f"{output}: {note}")
    require_space(_needed_space([plan for plan in plans if not plan.is_there]))
    return plans


def _load_compilers(engines: list[EngineOptions]) -> None:
    """Import every package that building the engines needs."""
    for options in engines:
        name, _, _ = choose(options.backend, options.device, options.compute_capabilities)
        if name == "onnxruntime":
            import_package("onnxruntime")


def _needed_space(plans: list[EnginePlan]) -> dict[Path, int]:
    """About how many bytes the engines will take beside each other in every directory, and their building."""
    needs: dict[Path, int] = {}
    largest: dict[Path, int] = {}  # Memory of one build in addition to its engine: builds run one after the other.
    for plan in plans:
        folder = plan.options.output_dir.absolute().parent
        needs[folder] = needs.get(folder, 0) + disk_bytes(plan)
        largest[folder] = max(largest.get(folder, 0), disk_bytes_to_build(plan) - disk_bytes(plan))
    return {folder: size + largest[folder] for folder, size in needs.items()}


def _build_one(options: EngineOptions, force: bool, advance: Advance = lambda _amount: None) -> str:
    """Build one engine directory; returns a summary line. Raises SpecError."""
    stages = Stages()
    with new_directory(options.output_dir, force) as work:
        config = _compile(plan_engine(options), work, advance)
        if config.backend.device == "cpu" and not config.graph.is_head:  # Only the target's bits are the text's.
            config = config.model_copy(update=_measure(work, config))
        # Written last: a directory without it does not load.
        (work / CONFIG_NAME).write_text(config.model_dump_json(indent=2) + "\n")
    size = sum(info.bytes for info in config.files.values())
    notes = "".join(f"; {note}" for note in config.provenance.notes)
    summary = f"{config.backend.name} engine, {human_bytes(size)}, {stages.seconds:.1f} s"
    return f"{options.output_dir}: {summary}{notes}"


def _measure(directory: Path, config: EngineConfig) -> dict[str, Any]:
    """Where the engine that was just built is exact to the bit, and how long its passes take. Raises BuildError."""
    with closing(open_host_backend(directory, config, blocks=0)) as backend:
        if not shapes_agree(backend):
            raise BuildError(
                f"{directory}: a token's bits depend on what is computed beside it, so drafts would change texts; that "
                "is an error of specbuild: please report the model"
            )
        return {"exact_on": describe_runtime(config), "pass_times": time_passes(backend)}


def _compile(plan: EnginePlan, work: Path, advance: Advance) -> EngineConfig:
    source, checkpoint = plan.options.checkpoint_dir, plan.checkpoint
    if plan.build.tp_size > 1:
        compiled = compile_ranks(plan, work, advance)
    else:
        compiled = plan.compiler(source, checkpoint.graph, plan.build, work, advance)
    copied = [*tokenizer_files(source), *(name for name in MARKOV_FILES if name in checkpoint.files)]
    for file in copied:
        shutil.copyfile(source / file, work / file)
    require_own_tokenizer(source, checkpoint.tokenizer, CheckpointError)
    return EngineConfig(
        backend=compiled.backend,
        build_config=plan.build,
        graph=compiled.graph,
        io=compiled.io,
        tokenizer=checkpoint.tokenizer,
        eos_token_ids=checkpoint.eos_token_ids,
        pretrained_config=checkpoint.pretrained_config,
        provenance=plan.provenance.model_copy(update={"notes": compiled.notes}),
        files={file: describe_file(work / file) for file in (*compiled.files, *copied)},
        modified={file: (work / file).stat().st_mtime_ns for file in (*compiled.files, *copied)},
    )
