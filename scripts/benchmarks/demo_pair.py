"""The demo pair beside its target alone: greedy, and drawn with both ways to accept. Needs what scripts/demo leaves."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import click
from rich.console import Console

from scripts.benchmarks.prompts import PROMPTS
from specrun.config import DraftTargetConfig
from specrun.engine_dir.config import open_engine
from specrun.evaluation.bench import bench, machine_of
from specrun.evaluation.bench_settings import BenchSettings
from specrun.evaluation.bench_tables import table
from specrun.sampling.sampler import SamplingParams
from specrun.text.tokenizer import load_tokenizer

WARM = SamplingParams(temperature=0.8, seed=1)
CONFIG = DraftTargetConfig(reuse_blocks=False, shared_thread_pool=True)
WAYS = {
    "greedy": BenchSettings((1, 4), (4, "auto"), params=SamplingParams(seed=1), config=CONFIG),
    "temperature 0.8, exact match": BenchSettings((1,), (4, "auto"), params=WARM, config=CONFIG),
    "temperature 0.8, rejection sampling": BenchSettings(
        (1,), (4, "auto"), params=WARM, config=replace(CONFIG, use_logits=True)
    ),
}


@click.command()
@click.option("--demo_dir", type=click.Path(path_type=Path), default=Path("demo"), show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")
def main(demo_dir: Path, json_file: Path | None) -> None:
    """Measure what the demo's draft gains."""
    target, draft = (demo_dir / "engines" / name for name in ("target", "draft"))
    tokenizer = load_tokenizer(target)
    prompts = [tokenizer.encode(text).ids for text in PROMPTS[:4]]
    found = {}
    for way, settings in WAYS.items():
        results = bench(target, draft, prompts, settings, lambda line: click.echo(line, err=True))
        click.echo(f"\n{way}")
        Console(width=110).print(table(results))
        found[way] = [asdict(result) for result in results]
    if json_file:
        machine = machine_of(open_engine(target))
        json_file.write_text(json.dumps({"machine": machine, "results": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
