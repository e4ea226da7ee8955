#!/usr/bin/env python3
"""Run every GPU test and benchmark that this machine can run, and write one JSON file with what they showed.

Says which of TensorRT, TensorRT-RTX and ONNX Runtime CUDA are usable, and why the others are not. Needs no network and
no installation: a Python with torch, transformers, onnx and cuda-python, and the libraries that
scripts/pack_gpu_bundle.py packs, are enough. Models are made here, from the small trained pair: --size 8B runs a target
of Llama 3.1 8B's shape and vocabulary with a draft of Llama 3.2 1B's, in float16, which write the small pair's text.

Every part runs in a process of its own, so that one that fails, hangs or crashes harms no other; every figure is in
the file as soon as it is known. What a part lacks of an earlier one, engines say, it says. To go on in another call:
the same --output and --work_dir, and --part for what is missing.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # It runs without being installed.

try:
    import click

    from scripts.benchmarks.gpu.card import versions
    from scripts.benchmarks.gpu.parts import PARTS, Part, Settings
    from scripts.benchmarks.gpu.results import OutOfTime, Results
    from scripts.benchmarks.gpu.sizes import SIZES
    from specrun.backends import BACKEND_NAMES
    from specrun.devices.driver import why_no_gpu
    from specrun.engine_dir.config import BackendName
    from specrun.gpu.backend import why_no_gpu_backend
except ModuleNotFoundError as error:
    sys.exit(
        f"Error: {error}; install the project (scripts/setup, then .venv/bin/python scripts/gpu_check.py), or on a "
        "host without a network what scripts/pack_gpu_bundle.py packs"
    )

ROOT = Path(__file__).resolve().parents[1]
GRACE = 20
"""Seconds that a part's process may take longer than its work."""


def run_here(results: Results, part: Part, settings: Settings, backend: str) -> None:
    """Do the work of a part in this process. Its errors are in the file."""
    place = results.part("backends", backend) if part.of_backend else results
    place.attempt(part.name, part.work, settings, backend)


def run_apart(path: Path, part: Part, settings: Settings, backend: str, seconds: float | None) -> str:
    """Do it in a process of its own; returns what became of it."""
    command = [sys.executable, str(Path(__file__).resolve()), "--here", "--part", part.name]
    for option in ("size", "draft_len", "work_dir", "output"):
        command += [f"--{option}", str(getattr(settings, option))]
    command += ["--quick"] if settings.quick else []
    command += ["--backend", backend] if part.of_backend else []
    command += [] if seconds is None else ["--budget", str(seconds)]
    said = ""
    limit = None if seconds is None else seconds + GRACE
    # A group of its own, so that what it has started ends with it.
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, process_group=0)
    try:
        output, _ = child.communicate(timeout=limit)
        if child.returncode:
            said = f"exit status {child.returncode}: {' '.join(output.split())[-1000:]}"
    except BaseException as error:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        said = f"did not end within {limit:.0f} s"
    results = Results.in_file(path)
    place = results.part("backends", backend, part.name) if part.of_backend else results.part(part.name)
    if said:
        place.put(error=said)
    return str(place.figures.get("error") or place.figures.get("stopped") or "done")


@click.command(context_settings={"token_normalize_func": lambda name: name.replace("-", "_")})
@click.option("--output", type=click.Path(path_type=Path), default=Path("gpu_check.json"), show_default=True)
@click.option("--work_dir", type=click.Path(path_type=Path), help="Keeps the models for the next run.")
@click.option("--size", type=click.Choice(list(SIZES)), default="demo", show_default=True)
@click.option("--draft_len", type=click.IntRange(1), default=4, show_default=True)
@click.option("--backend", "backends", multiple=True, type=click.Choice(BACKEND_NAMES), help="Default: all.")
@click.option("--part", "names", multiple=True, type=click.Choice([part.name for part in PARTS]), help="Default: all.")
@click.option("--budget", type=click.FloatRange(0), help="Seconds after which nothing further is begun.")
@click.option("--quick", is_flag=True, help="Measure less: the smallest and largest sizes, each once.")
@click.option("--here", is_flag=True, hidden=True, help="In this process, which is for nothing else.")
def main(
    output: Path,
    work_dir: Path | None,
    size: str,
    draft_len: int,
    backends: tuple[BackendName, ...],
    names: tuple[str, ...],
    budget: float | None,
    quick: bool,
    here: bool,
) -> None:
    """Check and measure everything that runs on this machine's first GPU. Exit 1 where there is none."""
    chosen = [part for part in PARTS if not names or part.name in names]
    with tempfile.TemporaryDirectory() as scratch:
        work = (work_dir or Path(scratch)).resolve()
        settings = Settings(size, draft_len, work, output.resolve(), quick)
        if here:
            results = Results.in_file(output, float("inf") if budget is None else budget)
            for part in chosen:
                for backend in backends if part.of_backend else ("",):
                    try:
                        run_here(results, part, settings, backend)
                    except OutOfTime:
                        continue
            return
        began, results = time.monotonic(), Results.in_file(output)
        results.put(size=size, draft_len=draft_len, machine=versions())
        usable = []
        for name in backends or BACKEND_NAMES:
            reason = why_no_gpu_backend(name)
            results.part("backends", name).put(usable=reason is None, **({"because": reason} if reason else {}))
            usable += [] if reason else [name]
            click.echo(f"{name}: {reason or 'usable'}")
        if reason := why_no_gpu():
            raise click.ClickException(f"nothing to check: {reason}; what is installed stands in {output}")
        for part in chosen:
            for backend in usable if part.of_backend else [""]:
                left = None if budget is None else max(0.0, budget - (time.monotonic() - began))
                before = time.monotonic()
                said = run_apart(output, part, settings, backend, left)
                click.echo(f"{part.name} {backend}: {said} ({time.monotonic() - before:.1f} s)".replace(" :", ":"))
    click.echo(f"{output}: written")


if __name__ == "__main__":
    main()
