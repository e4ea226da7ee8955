#!/usr/bin/env python3
"""The demo pair with --draft_len auto against the target alone: good and bad drafts, batches of 1, 4 and 16.

Of draft models, a bad one guesses (the draft's shape with random weights) or costs as much as the target (the target
itself). Of draft heads and of suffix matching beside a model, a bad one guesses; suffix matching alone finds little in
these texts. Needs what scripts/demo --kinds leaves in demo/; engines for batches of 16 are built in a temporary
directory.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import click
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

sys.path.insert(0, str(Path(__file__).parents[2]))

from scripts.benchmarks.engines import build, random_checkpoint, to_onnx
from scripts.benchmarks.prompts import PROMPTS
from specrun.config import DraftKind
from specrun.engine_dir.config import open_engine
from specrun.evaluation.bench import Settings, as_json, measure
from specrun.evaluation.bench_results import table
from specrun.text.tokenizer import load_tokenizer


class Case(NamedTuple):
    """A draft: names of engines, and --draft."""

    draft: str | None
    target: str = "target"
    lookup: DraftKind | None = None


CASES = {
    "a good draft": Case("draft"),
    "a draft that guesses": Case("random"),
    "the target": Case("target"),
    "an EAGLE-3 head": Case("eagle3", "eagle3_target"),
    "an EAGLE-3 head that guesses": Case("random_eagle3", "eagle3_target"),
    "Medusa heads": Case("medusa", "medusa_target"),
    "Medusa heads that guess": Case("random_medusa", "medusa_target"),
    "suffix matching": Case(None, lookup="suffix"),
    "suffix matching beside a good draft": Case("draft", lookup="suffix"),
    "suffix matching beside one that guesses": Case("random", lookup="suffix"),
}


def guessing_head(head: Path, output: Path) -> Path:
    """A head with random weights, but for what its target computes for it."""
    shutil.copytree(head, output)
    (file,) = output.glob("*.safetensors")
    tensors, generator = load_file(file), torch.Generator().manual_seed(0)
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and name != "fc.weight":
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * tensor.std())
    save_file(tensors, file)
    return output


def make_engine(name: str, demo_dir: Path, work: Path, max_batch_size: int) -> Path:
    """The engine of this name, made if it is not there yet."""
    root = demo_dir / "kinds" if name.removesuffix("_target").endswith(("eagle3", "medusa")) else demo_dir
    engine, onnx, hf = work / name, root / "onnx" / name, root / "hf"
    if engine.exists():
        return engine
    if name.startswith("random"):
        of = name.removeprefix("random").removeprefix("_")
        made = work / "hf" / name
        if of:
            onnx = to_onnx(guessing_head(hf / of, made), work / "onnx" / name, head_of=str(hf / "target"))
        else:
            config = AutoConfig.from_pretrained(hf / "draft")
            onnx = to_onnx(random_checkpoint(config, hf / "draft", made), work / "onnx" / name)
    build(onnx, engine, max_batch_size=max_batch_size, max_input_len=64)
    return engine


@click.command(context_settings={"token_normalize_func": lambda name: name.replace("-", "_")})
@click.option("--demo_dir", type=click.Path(path_type=Path), default=Path("demo"), show_default=True)
@click.option("--case", "cases", type=click.Choice(list(CASES)), multiple=True, default=tuple(CASES))
@click.option("--batch_size", "batch_sizes", type=int, multiple=True, default=(1, 4, 16), show_default=True)
@click.option("--output_len", type=int, default=96, show_default=True)
@click.option("--repetitions", type=int, default=3, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")
def main(
    demo_dir: Path,
    cases: tuple[str, ...],
    batch_sizes: tuple[int, ...],
    output_len: int,
    repetitions: int,
    json_file: Path | None,
) -> None:
    """Measure --draft_len auto where it should help, and where it must not harm."""
    found = {}
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        for what in cases:
            case = CASES[what]
            target = make_engine(case.target, demo_dir, work, max(batch_sizes))
            draft = make_engine(case.draft, demo_dir, work, max(batch_sizes)) if case.draft else None
            tokenizer = load_tokenizer(target)
            prompts = [tokenizer.encode(text).ids for text in PROMPTS[:4]]
            settings = Settings(batch_sizes, (None,), output_len, repetitions, draft=case.lookup)
            results = measure(target, draft, prompts, settings, lambda line: click.echo(line, err=True))
            click.echo(f"\n{what}")
            Console(width=110).print(table(results))
            found[what] = [asdict(result) for result in results]
        machine = json.loads(as_json([], open_engine(target), settings))
    if json_file:
        json_file.write_text(json.dumps({**machine, "results": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
