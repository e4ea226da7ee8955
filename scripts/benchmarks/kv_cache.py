"""Caches in few bits beside float32 on a CPU, of real models: what they do to predictions, and the time of passes.

Needs what scripts.real_models makes. Quality: of rows of ``TEXT_LEN`` tokens of prose, code and chat (or as many as
there are), beside the engine in float32 with a cache in float32; the tokens of the second half, which have read the
most. Passes of all caches take
turns in one run, beside weights in the same format. Engines are kept in --work_dir.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt

from scripts.benchmarks.engines import build, to_onnx
from scripts.benchmarks.quality import compare, rows_of
from scripts.benchmarks.quantized import Floats
from scripts.real_models import REAL_MODELS
from specrun.backends import Backend, open_host_backend
from specrun.engine_dir.config import open_engine
from specrun.evaluation.bench import machine_of
from specrun.evaluation.bench_results import Spread
from specrun.evaluation.report.bandwidth import fastest

WEIGHTS = {"float32": "auto", "int8": "int8"}
CACHES = ("float32", "float16", "int8", "int4")
BASE = "float32"
TEXT_LEN, CHUNK = 640, 64
SIZES = {"max_batch_size": 4, "max_input_len": 512, "max_seq_len": 8180}
TOKENS, POSITIONS, BATCHES = (1, 4, 256), (512, 2048, 8128), (1, 4)
TURNS, PASSES = 5, 2


def engine_of(checkpoint: Path, work: Path, weights: str, cache: str) -> Path:
    """The engine, which is built where it is not there yet."""
    engine, onnx = work / f"{weights}-{cache}", work / f"{weights}.onnx"
    if not engine.exists():
        if not onnx.exists():
            to_onnx(checkpoint, onnx, verify=False, qformat=WEIGHTS[weights])
        build(onnx, engine, **SIZES, kv_cache_dtype=cache)
    return engine


def logits(engine: Path, rows: npt.NDArray[np.int64]) -> Iterator[Floats]:
    """[tokens / 2, V] of each row: of its second half."""
    backend, length = open_host_backend(engine, open_engine(engine), blocks=0), rows.shape[1]
    backend.resize(1, length, 0)
    step = backend.bind(0, 1, CHUNK, CHUNK)
    for row in rows:
        found = []
        for start in range(0, length, CHUNK):
            step.input_ids[0], step.write_indices[0] = row[start : start + CHUNK], start
            step.logits_indices[0] = range(CHUNK)
            step.run()
            if start >= length // 2:
                found.append(step.logits[0].copy())
        yield np.concatenate(found)
    backend.close()


def quality_of(checkpoint: Path, work: Path, count: int) -> dict[str, Any]:
    """KL and the rest of weights in float32 and in 8 bits with each cache, by the kind of text."""
    results: dict[str, Any] = {}
    base = engine_of(checkpoint, work, BASE, BASE)
    for kind, every in rows_of(checkpoint, count, TEXT_LEN).items():
        half = every.shape[1] // (2 * CHUNK) * CHUNK
        rows, last = every[:, : 2 * half], every[:, half : 2 * half]
        expected = list(logits(base, rows))
        for weights in WEIGHTS:
            for cache in CACHES:
                engine = engine_of(checkpoint, work, weights, cache)
                if engine != base:
                    found = asdict(compare(iter(expected), logits(engine, rows), last))
                    results.setdefault(f"weights {weights}, cache {cache}", {})[kind] = found
                    click.echo(f"{checkpoint.name} {kind}, weights {weights}, cache {cache}: {found}")
    return results


def seconds(backend: Backend, batch: int, tokens: int, positions: int) -> float:
    """The fastest of a few passes whose rows end at ``positions``."""
    step = backend.bind(0, batch, tokens, 1)
    step.input_ids[...] = np.random.default_rng(0).integers(0, 1000, (batch, tokens))
    step.write_indices[...] = positions - tokens
    step.logits_indices[...] = tokens - 1
    return fastest(step.run, PASSES)


def pass_times(checkpoint: Path, work: Path, every: Sequence[str]) -> list[dict[str, Any]]:
    """Milliseconds of passes, and how many times faster than with a cache in float32 in the same turn."""
    results = []
    for weights in every:
        backends = {}
        for cache in CACHES:
            engine = engine_of(checkpoint, work, weights, cache)
            backends[cache] = open_host_backend(engine, open_engine(engine), blocks=0)
        for batch in BATCHES:
            for positions in POSITIONS:
                for backend in backends.values():
                    backend.resize(batch, positions + 64, 0)
                    for tensor in backend.cache.part(0, batch):
                        tensor[...] = 0  # Scales of before could be NaN, whose tokens cost nothing.
                for tokens in TOKENS if batch == 1 else TOKENS[:2]:
                    if tokens > positions:
                        continue
                    turns = [
                        {cache: seconds(backend, batch, tokens, positions) for cache, backend in backends.items()}
                        for _ in range(TURNS + 1)
                    ][1:]
                    row: dict[str, Any] = {"weights": weights, "batch": batch, "positions": positions, "tokens": tokens}
                    for cache in CACHES:
                        times = [1e3 * turn[cache] for turn in turns]
                        ratios = [turn[BASE] / turn[cache] for turn in turns]
                        row[cache] = {"milliseconds": asdict(Spread.of(times)), "of_float32": asdict(Spread.of(ratios))}
                    results.append(row)
                    shown = ", ".join(f"{cache} {row[cache]['of_float32']['median']:.2f}x" for cache in CACHES)
                    click.echo(f"{weights} {batch} x {tokens} at {positions}: {shown}")
        for backend in backends.values():
            backend.close()
    return results


@click.command()
@click.option("--models_dir", type=click.Path(path_type=Path), default=Path(".cache/real_models"), show_default=True)
@click.option("--model", "names", type=click.Choice(list(REAL_MODELS)), multiple=True, default=list(REAL_MODELS))
@click.option("--part", type=click.Choice(["quality", "passes"]), multiple=True, default=["quality", "passes"])
@click.option("--weights", type=click.Choice(list(WEIGHTS)), multiple=True, default=list(WEIGHTS), help="Of passes.")
@click.option("--rows", type=int, default=1, show_default=True, help=f"Texts of {TEXT_LEN} tokens of a kind.")
@click.option("--work_dir", type=click.Path(path_type=Path), required=True, help="Engines are kept here; 6 GB.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Add the figures to this file.")
def main(
    models_dir: Path,
    names: tuple[str, ...],
    part: tuple[str, ...],
    weights: tuple[str, ...],
    rows: int,
    work_dir: Path,
    json_file: Path | None,
) -> None:
    """Measure what caches in few bits gain and cost."""
    report: dict[str, Any] = json.loads(json_file.read_text()) if json_file and json_file.is_file() else {}
    for name in names:
        checkpoint, work = models_dir / name, work_dir / name
        work.mkdir(parents=True, exist_ok=True)
        own = report.setdefault(name, {})
        if "quality" in part:
            own["quality"] = quality_of(checkpoint, work, rows)
        if "passes" in part:
            own["passes"] = pass_times(checkpoint, work, weights)
        own["machine"] = machine_of(open_engine(engine_of(checkpoint, work, BASE, BASE)))
        if json_file:
            json_file.write_text(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
