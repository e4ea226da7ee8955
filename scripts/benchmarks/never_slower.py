#!/usr/bin/env python3
"""The demo pair with --draft_len auto against the target alone: good and bad drafts, batches of 1, 4 and 16.

Bad drafts are one that guesses (the draft's shape with random weights) and one that costs as much as the target (the
target itself). Needs what scripts/demo leaves in demo/; engines for batches of 16 are built in a temporary directory.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import click
from rich.console import Console
from transformers import AutoConfig

sys.path.insert(0, str(Path(__file__).parents[2]))

from scripts.benchmarks.engines import build, random_checkpoint, to_onnx
from specrun.bench import Settings, as_json, measure
from specrun.bench_results import table
from specrun.engine_dir import open_engine
from specrun.tokenizer import load_tokenizer

PROMPTS = ("The try statement", "A class definition is", "The import statement", "Exceptions are")


@click.command()
@click.option("--demo_dir", type=click.Path(path_type=Path), default=Path("demo"), show_default=True)
@click.option("--batch_size", "batch_sizes", type=int, multiple=True, default=(1, 4, 16), show_default=True)
@click.option("--output_len", type=int, default=96, show_default=True)
@click.option("--repetitions", type=int, default=3, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")
def main(
    demo_dir: Path, batch_sizes: tuple[int, ...], output_len: int, repetitions: int, json_file: Path | None
) -> None:
    """Measure --draft_len auto where it should help, and where it must not harm."""
    found = {}
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        trained = demo_dir / "hf" / "draft"
        guessing = random_checkpoint(AutoConfig.from_pretrained(trained), trained, work / "hf")
        to_onnx(guessing, work / "onnx" / "random")
        for role, onnx in (("target", demo_dir / "onnx"), ("draft", demo_dir / "onnx"), ("random", work / "onnx")):
            build(onnx / role, work / role, max_batch_size=max(batch_sizes), max_input_len=64)
        tokenizer = load_tokenizer(work / "target")
        prompts = [tokenizer.encode(text).ids for text in PROMPTS]
        settings = Settings(batch_sizes, (None,), output_len, repetitions)
        for draft, what in (("draft", "a good draft"), ("random", "a draft that guesses"), ("target", "the target")):
            results = measure(work / "target", work / draft, prompts, settings, lambda line: click.echo(line, err=True))
            click.echo(f"\n{what}")
            Console(width=110).print(table(results))
            found[what] = [asdict(result) for result in results]
        machine = json.loads(as_json([], open_engine(work / "target"), settings))
    if json_file:
        json_file.write_text(json.dumps({**machine, "results": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
