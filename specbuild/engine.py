"""``specbuild engine``: ONNX checkpoint directory -> engine directory."""

from __future__ import annotations

import multiprocessing
import shutil
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.synchronize import Event as EventType
from pathlib import Path

from specbuild.checkpoint import CheckpointConfig, open_checkpoint
from specbuild.compilers import choose
from specbuild.config import EngineOptions, plan_build
from specbuild.convert import provenance
from specbuild.files import new_directory, require_free
from specbuild.progress import Advance, Stages, human_bytes
from specrun.engine_dir import CONFIG_NAME, BuildConfig, EngineConfig, describe_file
from specrun.errors import BuildConfigError, BuildError
from specrun.tokenizer import TOKENIZER_FILES


def build_engines(engines: list[EngineOptions], workers: int, force: bool, stages: Stages) -> None:
    """Build every engine, ``workers`` at a time. All settings are checked before the first build. Raises SpecError."""
    checkpoints = [open_checkpoint(options.checkpoint_dir) for options in engines]
    for options, checkpoint in zip(engines, checkpoints, strict=True):
        if options.output_dir.resolve() == options.checkpoint_dir.resolve():
            raise BuildConfigError(f"{options.output_dir}: is the checkpoint itself; choose another --output_dir")
        require_free(options.output_dir, force)
        _, notes = plan_build(options, checkpoint)
        name, _, reason = choose(options.backend)
        stages.say(f"{options.output_dir}: backend {name}: {reason}")
        for note in notes:
            stages.say(f"{options.output_dir}: {note}")
    if workers <= 1 or len(engines) == 1:
        for options in engines:
            with stages.stage(f"build {options.output_dir}", 1.0) as advance:
                summary = build_engine(options, force, advance)
            stages.say(summary)
        return
    # Fresh processes: a fork would copy the compilers' threads in an undefined state.
    context = multiprocessing.get_context("spawn")
    stop = context.Event()
    with ProcessPoolExecutor(workers, context, _start_worker, (stop,)) as pool:
        with stages.stage(f"build {len(engines)} engines", len(engines)) as advance:
            with _no_interrupt():  # Workers inherit it, so that Ctrl-C finds none of them half started.
                futures: list[Future[str]] = [pool.submit(_build_in_worker, options, force) for options in engines]
            try:
                for future in as_completed(futures):
                    future.result()
                    advance(1.0)
            except BrokenProcessPool as error:
                raise BuildError(
                    f"--workers {workers}: a worker process was killed, perhaps for lack of memory; give fewer workers"
                ) from error
            except BaseException:
                stop.set()
                pool.shutdown(cancel_futures=True)
                raise
        for future in futures:
            stages.say(future.result())


@contextmanager
def _no_interrupt() -> Iterator[None]:
    """Ctrl-C waits until the block has ended."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start_worker(stop: EventType) -> None:
    """A worker ignores Ctrl-C, which reaches the whole process group, except while it builds."""
    global _stop
    _stop = stop
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _build_in_worker(options: EngineOptions, force: bool) -> str:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        if _stop and _stop.is_set():
            raise KeyboardInterrupt
        return build_engine(options, force)
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


_stop: EventType | None = None
"""In a worker: set once the command was interrupted, so that what was waiting is not begun."""


def build_engine(options: EngineOptions, force: bool, advance: Advance = lambda _amount: None) -> str:
    """Build one engine directory; returns a summary line. Raises SpecError."""
    stages = Stages()
    checkpoint = open_checkpoint(options.checkpoint_dir)
    build, _ = plan_build(options, checkpoint)
    with new_directory(options.output_dir, force) as work:
        config = _compile(options, checkpoint, build, work, advance)
        # Written last: a directory without it does not load.
        (work / CONFIG_NAME).write_text(config.model_dump_json(indent=2) + "\n")
    size = sum(info.bytes for info in config.files.values())
    notes = "".join(f"; {note}" for note in config.provenance.notes)
    return f"{options.output_dir}: {config.backend.name} engine, {human_bytes(size)}, {stages.seconds:.1f} s{notes}"


def _compile(
    options: EngineOptions,
    checkpoint: CheckpointConfig,
    build: BuildConfig,
    work: Path,
    advance: Callable[[float], None],
) -> EngineConfig:
    name, compiler, _ = choose(options.backend)
    compiled = compiler(options.checkpoint_dir, checkpoint.graph, build, work, advance)
    for file in TOKENIZER_FILES:
        if (options.checkpoint_dir / file).is_file():
            shutil.copyfile(options.checkpoint_dir / file, work / file)
    package = {"onnxruntime": "onnxruntime"}.get(name)
    return EngineConfig(
        backend=compiled.backend,
        build_config=build,
        graph=compiled.graph,
        io=compiled.io,
        tokenizer=checkpoint.tokenizer,
        eos_token_ids=checkpoint.eos_token_ids,
        pretrained_config=checkpoint.pretrained_config,
        provenance=provenance(
            "specbuild engine", str(options.checkpoint_dir), compiled.notes, *([package] if package else [])
        ),
        files={file: describe_file(work / file) for file in compiled.files},
    )
