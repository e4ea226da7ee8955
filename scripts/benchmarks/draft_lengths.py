#!/usr/bin/env python3
"""--draft_len auto against every fixed length, on a pair that nothing was tuned on, in float32, 8 and 4 bits.

The pair learns other texts than the demo pair (the docstrings of Python's library), and has another shape: a target of
197M parameters in 16 layers, a draft of 1.4M. It is made in --work_dir, once, in about ten minutes. Every group of
texts is decoded by all ways in turns, and auto counts from its first text on.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).parents[2]))

from scripts.benchmarks.engines import build, to_onnx
from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.engine_dir.config import open_engine
from specrun.evaluation.bench import Settings, as_json
from specrun.request.request import Request
from specrun.sampling.sampler import SamplingParams

ROOT = Path(__file__).resolve().parents[2]
FORMS = ("float32", "int8", "int4")
MOST = 10
LENGTHS = (0, 1, 2, 3, 4, 5, 7, MOST)
SIZES = {
    "target": {"num_layers": 16, "hidden_size": 1024, "intermediate_size": 2944, "num_heads": 16, "num_kv_heads": 8},
    "draft": {"num_layers": 2, "hidden_size": 192, "intermediate_size": 512, "num_heads": 6, "num_kv_heads": 3},
}


def make_pair(work: Path) -> None:
    """Hugging Face checkpoints in ``work``/hf, and prompts in ``work``/prompts.jsonl."""
    made = work / "pair"
    files = ["--prompts_file", str(work / "prompts.jsonl"), "--output_dir", str(made)]
    subprocess.run([sys.executable, ROOT / "scripts/make_demo_pair.py", "--corpus", "docstrings", *files], check=True)
    for model, sizes in SIZES.items():
        if not (work / "hf" / model / "config.json").exists():
            flags = [text for name, size in sizes.items() for text in (f"--{name}", str(size))]
            grown = ["--input_dir", str(made / model), "--output_dir", str(work / "hf" / model)]
            subprocess.run([sys.executable, ROOT / "scripts/grow_checkpoint.py", *grown, *flags], check=True)


def make_engine(work: Path, model: str, form: str) -> Path:
    """The engine of a checkpoint in a form, made if it is not there yet."""
    onnx, engine = work / "onnx" / f"{model}_{form}", work / "engines" / f"{model}_{form}"
    if not engine.exists():
        if not onnx.exists():
            to_onnx(work / "hf" / model, onnx, **({} if form == "float32" else {"qformat": form}))
        build(onnx, engine, max_batch_size=8, max_input_len=64, max_draft_len=MOST)
    return engine


def seconds_of(decoder: SpeculativeDecoder, ids: list[list[int]], draft_len: int | None, output_len: int) -> float:
    """The time of a batch of greedy texts; stop ids are ignored."""
    requests = [Request(prompt, SamplingParams(), output_len, draft_len=draft_len) for prompt in ids]
    began = time.perf_counter()
    for _ in decoder.run(requests):
        pass
    return time.perf_counter() - began


def measure(pair: tuple[Path, Path], prompts: list[str], batch: int, output_len: int) -> dict[str, Any]:
    """Seconds of each group of ``batch`` texts by each way, and what auto has of the best fixed length."""
    seconds: dict[str, list[float]] = {str(g): [] for g in (*LENGTHS, "auto")}
    with (
        SpeculativeDecoder.open(*pair, DraftTargetConfig(MOST, reuse_blocks=False)) as fixed,
        SpeculativeDecoder.open(*pair, DraftTargetConfig(reuse_blocks=False)) as auto,
    ):
        ids = [fixed.tokenizer.encode(text).ids for text in prompts]
        for decoder in (fixed, auto):
            seconds_of(decoder, ids[:batch], None, 1)  # Memory is allocated; no round says anything of draft lengths.
        for first in range(0, len(ids), batch):
            ways = list(seconds)
            turn = first // batch % len(ways)  # Nobody is always behind the same one.
            for way in ways[turn:] + ways[:turn]:
                decoder, draft_len = (auto, None) if way == "auto" else (fixed, int(way))
                seconds[way].append(seconds_of(decoder, ids[first : first + batch], draft_len, output_len))
    speedups = {way: sum(seconds["0"]) / sum(own) for way, own in seconds.items()}
    best = max((str(g) for g in LENGTHS), key=speedups.__getitem__)
    return {
        "batch_size": batch,
        "speedups": speedups,
        "best": int(best),
        "auto_of_best": speedups["auto"] / speedups[best],
        "auto_of_best_in_first_group": seconds[best][0] / seconds["auto"][0],
        "seconds": seconds,
    }


@click.command()
@click.option("--work_dir", type=click.Path(path_type=Path), default=Path(".cache/aside"), show_default=True)
@click.option("--form", "forms", type=click.Choice(FORMS), multiple=True, default=FORMS, show_default=True)
@click.option("--batch_size", "batches", type=int, multiple=True, default=(1, 2, 4, 8), show_default=True)
@click.option("--texts", type=int, default=16, show_default=True)
@click.option("--output_len", type=int, default=64, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")
def main(
    work_dir: Path,
    forms: tuple[str, ...],
    batches: tuple[int, ...],
    texts: int,
    output_len: int,
    json_file: Path | None,
) -> None:
    """Measure how close auto comes to the best fixed draft length."""
    make_pair(work_dir)
    prompts = [json.loads(line)["text"] for line in (work_dir / "prompts.jsonl").read_text().splitlines()[:texts]]
    results: dict[str, list[dict[str, Any]]] = {}
    for form in forms:
        pair = make_engine(work_dir, "target", form), make_engine(work_dir, "draft", "float32")
        for batch in batches:
            found = measure(pair, prompts, batch, output_len)
            results.setdefault(form, []).append(found)
            speeds = "  ".join(f"{way} {speed:.2f}x" for way, speed in found["speedups"].items())
            shares = f"{found['auto_of_best']:.1%}, in the first group {found['auto_of_best_in_first_group']:.1%}"
            click.echo(f"{form} batch {batch}: {speeds}  auto has {shares} of {found['best']}'s")
    if json_file:
        machine = json.loads(as_json([], open_engine(pair[0]), Settings()))["machine"]
        json_file.write_text(json.dumps({"machine": machine, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
