"""Passes of engines with several builds of the CPU operators, in turns within one process.

A build is a shared library, such as a copy of specrun/cpu_operators/_compiled*.so before a change. Its logits must have
the bits of the first build's. Passes have one row behind 128 positions, and are timed three at a time; medians.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from contextlib import ExitStack, closing
from pathlib import Path
from unittest.mock import patch

import click
import numpy as np

from specrun import cpu_operators
from specrun.backends import Backend, Pass, open_host_backend
from specrun.devices.processor import describe_processor
from specrun.engine_dir.config import open_engine

POSITIONS = 128
PASSES = 3


def bind(backend: Backend, tokens: int) -> Pass:
    """A pass of so many tokens, which are the same for every build."""
    bound = backend.bind(0, 1, tokens, tokens)
    bound.input_ids[0] = np.random.default_rng(tokens).integers(0, backend.config.graph.vocab_size, tokens)
    bound.write_indices[0] = POSITIONS
    bound.logits_indices[0] = range(tokens)
    return bound


def milliseconds(bound: Pass) -> float:
    """Of one pass."""
    bound.run()
    began = time.perf_counter()
    for _ in range(PASSES):
        bound.run()
    return 1e3 * (time.perf_counter() - began) / PASSES


@click.command()
@click.argument("engines", type=click.Path(exists=True, path_type=Path), nargs=-1, required=True)
@click.option("--build", "builds", type=click.Path(path_type=Path), multiple=True, required=True)
@click.option("--tokens", "widths", type=int, multiple=True, default=(1, 2, 3, 5, 9, 12), show_default=True)
@click.option("--turns", type=click.IntRange(1), default=15, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")
def main(
    engines: tuple[Path, ...], builds: tuple[Path, ...], widths: tuple[int, ...], turns: int, json_file: Path | None
) -> None:
    """Measure every engine."""
    results = []
    for engine in engines:
        with ExitStack() as opened:
            passes: dict[Path, dict[int, Pass]] = {}
            for build in builds:
                with patch.object(cpu_operators, "library", lambda build=build: build.absolute()):
                    backend = opened.enter_context(closing(open_host_backend(engine, open_engine(engine), 0)))
                backend.resize(1, 2 * POSITIONS, 0)
                passes[build] = {tokens: bind(backend, tokens) for tokens in widths}
            for tokens in widths:
                logits = []
                for build in builds:
                    passes[build][tokens].run()
                    logits.append(passes[build][tokens].logits.tobytes())
                if len(set(logits)) > 1:
                    raise click.ClickException(f"{engine}: logits of {tokens} tokens differ between builds")
                times: dict[Path, list[float]] = {build: [] for build in builds}
                for _ in range(turns):
                    for build in random.sample(builds, len(builds)):
                        times[build].append(milliseconds(passes[build][tokens]))
                for build in builds:
                    ratios = [own / first for own, first in zip(times[build], times[builds[0]], strict=True)]
                    found = {"ms": statistics.median(times[build]), "of_first": statistics.median(ratios)}
                    results.append({"engine": engine.name, "tokens": tokens, "build": build.stem, **found})
                    click.echo(
                        f"{engine.name}, {tokens} tokens, {build.stem}: {found['ms']:.2f} ms, {found['of_first']:.3f}"
                    )
    if json_file:
        figures = {"processor": describe_processor(), "date": time.strftime("%Y-%m-%d"), "results": results}
        json_file.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
