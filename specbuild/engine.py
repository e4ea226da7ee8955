"""``specbuild engine``: ONNX checkpoint directory -> engine directory."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from specbuild.checkpoint import CheckpointConfig, open_checkpoint, provenance
from specbuild.compilers import choose
from specbuild.config import EngineOptions, plan_build
from specbuild.files import require_space
from specbuild.progress import Advance, Stages, human_bytes
from specbuild.workers import run_side_by_side
from specrun.backends import open_host_backend
from specrun.bit_exact import BitExact
from specrun.directories import new_directory, require_free
from specrun.engine_dir import CONFIG_NAME, WEIGHTS_NAME, BuildConfig, EngineConfig, describe_file
from specrun.errors import BuildConfigError, CheckpointError
from specrun.extras import import_package
from specrun.probe import probe
from specrun.tokenizer import require_own_tokenizer, tokenizer_files


def build_engines(engines: list[EngineOptions], workers: int, force: bool, stages: Stages) -> None:
    """Build every engine, ``workers`` at a time. All settings are checked before the first build. Raises SpecError."""
    checkpoints = [open_checkpoint(options.checkpoint_dir) for options in engines]
    for options, checkpoint in zip(engines, checkpoints, strict=True):
        if options.output_dir.resolve() == options.checkpoint_dir.resolve():
            raise BuildConfigError(f"{options.output_dir}: is the checkpoint itself; choose another --output_dir")
        require_free(options.output_dir, force)
        _, notes = plan_build(options, checkpoint)
        name, _, reason = choose(options.backend, options.device, options.compute_capabilities)
        stages.say(f"{options.output_dir}: backend {name}: {reason}")
        for note in notes:
            stages.say(f"{options.output_dir}: {note}")
    require_space(_needed_space(engines, checkpoints))
    if workers <= 1 or len(engines) == 1:
        for options in engines:
            with stages.stage(f"build {options.output_dir}", 1.0) as advance:
                summary = build_engine(options, force, advance)
            stages.say(summary)
        return
    with stages.stage(f"build {len(engines)} engines", len(engines)) as advance:
        load = partial(_load_compilers, engines)
        summaries = run_side_by_side(partial(build_engine, force=force), engines, workers, advance, load)
    for summary in summaries:
        stages.say(summary)


def _load_compilers(engines: list[EngineOptions]) -> None:
    """Import every package that building the engines needs."""
    for options in engines:
        name, _, _ = choose(options.backend, options.device, options.compute_capabilities)
        if name == "onnxruntime":
            import_package("onnxruntime")


def _needed_space(engines: list[EngineOptions], checkpoints: list[CheckpointConfig]) -> dict[Path, int]:
    """About how many bytes the engines will take beside each other in every output directory's parent."""
    needs: dict[Path, int] = {}
    for options, checkpoint in zip(engines, checkpoints, strict=True):
        name, _, _ = choose(options.backend, options.device, options.compute_capabilities)
        # On the CPU 16-bit weights become float32.
        wider = name == "onnxruntime" and options.device != "cuda" and checkpoint.graph.dtype != "float32"
        parent = options.output_dir.absolute().parent
        needs[parent] = needs.get(parent, 0) + checkpoint.files[WEIGHTS_NAME].bytes * (2 if wider else 1)
    return needs


def build_engine(options: EngineOptions, force: bool, advance: Advance = lambda _amount: None) -> str:
    """Build one engine directory; returns a summary line. Raises SpecError."""
    stages = Stages()
    checkpoint = open_checkpoint(options.checkpoint_dir)
    build, _ = plan_build(options, checkpoint)
    with new_directory(options.output_dir, force) as work:
        config = _compile(options, checkpoint, build, work, advance)
        if config.backend.device == "cpu" and not config.graph.is_head:  # Only the target's bits are the text's.
            config = config.model_copy(update={"bit_exact": _probe(work, config)})
        # Written last: a directory without it does not load.
        (work / CONFIG_NAME).write_text(config.model_dump_json(indent=2) + "\n")
    size = sum(info.bytes for info in config.files.values())
    notes = "".join(f"; {note}" for note in config.provenance.notes)
    notes += f"; {config.bit_exact}" if config.bit_exact else ""
    return f"{options.output_dir}: {config.backend.name} engine, {human_bytes(size)}, {stages.seconds:.1f} s{notes}"


def _probe(directory: Path, config: EngineConfig) -> BitExact:
    """Which passes of the engine that was just built give a row the same bits."""
    backend = open_host_backend(directory, config, blocks=0)
    try:
        return probe(backend)
    finally:
        backend.close()


def _compile(
    options: EngineOptions,
    checkpoint: CheckpointConfig,
    build: BuildConfig,
    work: Path,
    advance: Callable[[float], None],
) -> EngineConfig:
    _, compiler, _ = choose(options.backend, options.device, options.compute_capabilities)
    compiled = compiler(options.checkpoint_dir, checkpoint.graph, build, work, advance)
    copied = tokenizer_files(options.checkpoint_dir)
    for file in copied:
        shutil.copyfile(options.checkpoint_dir / file, work / file)
    require_own_tokenizer(options.checkpoint_dir, checkpoint.tokenizer, CheckpointError)
    return EngineConfig(
        backend=compiled.backend,
        build_config=build,
        graph=compiled.graph,
        io=compiled.io,
        tokenizer=checkpoint.tokenizer,
        eos_token_ids=checkpoint.eos_token_ids,
        pretrained_config=checkpoint.pretrained_config,
        provenance=provenance("specbuild engine", str(options.checkpoint_dir), compiled.notes),
        files={file: describe_file(work / file) for file in (*compiled.files, *copied)},
    )
