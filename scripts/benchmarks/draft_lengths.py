#!/usr/bin/env python3
"""--draft_len auto against every fixed length, on two pairs: all of them take turns in one run.

Needs what scripts/demo leaves in demo/ and .cache/pair. The second pair has the same target and the draft as it was
trained, of 0.9M parameters instead of 5M; engines for batches are built in a temporary directory.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).parents[2]))

from scripts.benchmarks.engines import build, to_onnx
from scripts.benchmarks.prompts import PROMPTS
from specrun.bench import Settings, as_json
from specrun.bench_results import Spread
from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.engine_dir import open_engine
from specrun.request import Request
from specrun.sampling import SamplingParams

PAIRS = ("demo", "small_draft")
LENGTHS = (0, 1, 2, 3, 4, 5, 6, 7, 8, None)


def rate(decoder: SpeculativeDecoder, batch: int, draft_len: int | None, output_len: int) -> float:
    """Tokens/s of as many prompts as a batch has, four at least, ``batch`` at a time; stop ids are ignored."""
    ids = [decoder.tokenizer.encode(text).ids for text in PROMPTS[: max(4, batch)]]
    requests = [Request(prompt, SamplingParams(), output_len, draft_len=draft_len) for prompt in ids]
    began = time.perf_counter()
    for first in range(0, len(requests), batch):
        for _ in decoder.run(requests[first : first + batch]):
            pass
    return len(requests) * output_len / (time.perf_counter() - began)


def measure(
    pair: tuple[Path, Path], batches: tuple[int, ...], output_len: int, repetitions: int
) -> list[dict[str, Any]]:
    """One pair, all ways in turns; the first turn warms up."""
    results = []
    # Auto has a decoder of its own: it must not learn from the others' rounds.
    with (
        SpeculativeDecoder.open(*pair, DraftTargetConfig(8, reuse_blocks=False)) as fixed,
        SpeculativeDecoder.open(*pair, DraftTargetConfig(reuse_blocks=False)) as auto,
    ):
        for batch in batches:
            turns = []
            for turn in range(repetitions + 1):
                ways = [(auto if g is None else fixed, g) for g in LENGTHS]
                turns.append([rate(decoder, batch, g, output_len) for decoder, g in ways])
                click.echo(f"batch {batch}: turn {turn} of {repetitions}", err=True)
            speedups = [[way / turn[0] for way in turn] for turn in turns[1:]]
            found = dict(zip(LENGTHS, (Spread.of(values) for values in zip(*speedups, strict=True)), strict=True))
            best = max((spread.median, g) for g, spread in found.items() if g is not None)
            share = found[None].median / best[0]
            for g, spread in found.items():
                label = "auto" if g is None else g
                click.echo(f"{label!s:>5} {spread.median:6.2f}x  ({spread.lowest:.2f}..{spread.highest:.2f})")
            click.echo(f"batch {batch}: auto has {share:.1%} of the best fixed length's, {best[1]}")
            speeds = {"auto" if g is None else str(g): asdict(spread) for g, spread in found.items()}
            results.append({"batch_size": batch, "speedups": speeds, "auto_of_best": share})
    return results


@click.command()
@click.option("--demo_dir", type=click.Path(path_type=Path), default=Path("demo"), show_default=True)
@click.option("--pair_dir", type=click.Path(path_type=Path), default=Path(".cache/pair"), show_default=True)
@click.option("--batch_size", "batches", type=int, multiple=True, default=(1, 2, 4, 8), show_default=True)
@click.option("--pair", "pairs", type=click.Choice(PAIRS), multiple=True, default=PAIRS, show_default=True)
@click.option("--output_len", type=int, default=96, show_default=True)
@click.option("--repetitions", type=int, default=3, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")
def main(
    demo_dir: Path,
    pair_dir: Path,
    batches: tuple[int, ...],
    pairs: tuple[str, ...],
    output_len: int,
    repetitions: int,
    json_file: Path | None,
) -> None:
    """Measure how close auto comes to the best fixed draft length."""
    results = {}
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        sizes = {"max_batch_size": max(batches), "max_input_len": 64}
        build(demo_dir / "onnx" / "target", work / "target", **sizes)
        for pair in pairs:
            draft = demo_dir / "onnx" / "draft" if pair == "demo" else to_onnx(pair_dir / "draft", work / "onnx")
            build(draft, work / pair, **sizes)
            click.echo(pair)
            results[pair] = measure((work / "target", work / pair), batches, output_len, repetitions)
        machine = json.loads(as_json([], open_engine(work / "target"), Settings()))["machine"]
    if json_file:
        json_file.write_text(json.dumps({"machine": machine, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
