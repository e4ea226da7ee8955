"""Passes of engines with several builds of the CPU operators, in turns within one process.

A build is a shared library, such as a copy of specrun/cpu_operators/_compiled*.so before a change. Its logits must have
the bits of the first build's. Passes are those of ``roofline``: one row behind 128 positions, logits of every token.
"""

from __future__ import annotations

import json
import statistics
import time
from contextlib import ExitStack, closing
from pathlib import Path
from unittest.mock import patch

import click

from scripts.benchmarks.roofline import seconds_of
from specrun import cpu_operators
from specrun.backends import Backend
from specrun.backends.ort import OrtBackend
from specrun.devices.processor import describe_processor
from specrun.engine_dir.config import open_engine


def open_with(build: Path, engine: Path) -> Backend:
    """The engine, computed by the operators of this build."""
    with patch.object(cpu_operators, "library", lambda: build.absolute()):
        return OrtBackend(engine, open_engine(engine), 1)


@click.command()
@click.argument("engines", type=click.Path(exists=True, path_type=Path), nargs=-1, required=True)
@click.option("--build", "builds", type=click.Path(path_type=Path), multiple=True, required=True)
@click.option("--width", "widths", type=int, multiple=True, default=(1, 2, 3, 5, 9, 12), show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")
def main(engines: tuple[Path, ...], builds: tuple[Path, ...], widths: tuple[int, ...], json_file: Path | None) -> None:
    """Measure every engine."""
    results = []
    for engine in engines:
        with ExitStack() as stack:
            backends = [stack.enter_context(closing(open_with(build, engine))) for build in builds]
            seconds = seconds_of(backends, widths)
        for width, turns in seconds.items():
            for build, own in zip(builds, turns, strict=True):
                ratio = statistics.median(later / first for later, first in zip(own, turns[0], strict=True))
                found = {"ms": 1e3 * statistics.median(own), "of_first": ratio}
                results.append({"engine": engine.name, "tokens": width, "build": build.stem, **found})
                click.echo(f"{engine.name}, {width} tokens, {build.stem}: {found['ms']:.2f} ms, {ratio:.3f}")
    if json_file:
        figures = {"processor": describe_processor(), "date": time.strftime("%Y-%m-%d"), "results": results}
        json_file.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
