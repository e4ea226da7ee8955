"""Mixtures of experts on a CPU: engines that read the experts a pass uses, beside engines that compute all of them.

Weights are random, so tokens choose experts evenly, as trained routers are made to do. Checkpoints and engines are
made in a temporary directory and take turns in one run. Needs demo/ for its tokenizer.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import click
import numpy as np
import numpy.typing as npt
import transformers

from scripts.benchmarks.engines import build, random_checkpoint, to_onnx
from specbuild.compilers import onnxruntime
from specrun.backends import Backend, open_host_backend
from specrun.engine_dir.config import open_engine
from specrun.evaluation.bench import as_json
from specrun.evaluation.bench_results import Spread
from specrun.evaluation.bench_settings import BenchSettings
from specrun.evaluation.report.bandwidth import fastest

SIZES: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
}
MODELS = {
    "8 experts, 2 a token": transformers.MixtralConfig(
        **SIZES, intermediate_size=1792, num_local_experts=8, num_experts_per_tok=2
    ),
    "128 experts, 8 a token": transformers.Qwen3MoeConfig(
        **SIZES, moe_intermediate_size=384, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True
    ),
}
"""Mixtral and Qwen3-30B-A3B with fewer layers of smaller width."""
TOKENS, POSITIONS = (1, 2, 3, 5, 9, 64), 128
TURNS, PASSES = 7, 3


def seconds(backend: Backend, ids: npt.NDArray[np.int64]) -> float:
    """The fastest of a few passes of one row behind ``POSITIONS`` tokens."""
    step = backend.bind(0, 1, len(ids), 1)
    step.input_ids[...], step.write_indices[...], step.logits_indices[...] = ids, POSITIONS, len(ids) - 1
    return fastest(step.run, PASSES)


def compare(config: transformers.PreTrainedConfig, tokenizer: Path, work: Path) -> list[dict[str, Any]]:
    """Milliseconds of passes of both engines, and their ratio."""
    checkpoint = to_onnx(random_checkpoint(config, tokenizer, work / "hf"), work / "onnx", verify=False)
    build(checkpoint, work / "used")
    with mock.patch.object(onnxruntime, "skip_unused_experts", lambda _model: 0):
        build(checkpoint, work / "all")
    backends = {name: open_host_backend(work / name, open_engine(work / name), blocks=0) for name in ("used", "all")}
    rng, found = np.random.default_rng(0), []
    for backend in backends.values():
        backend.resize(1, POSITIONS + 64, 0)
    for tokens in TOKENS:
        turns = []
        for _ in range(TURNS + 1):
            ids = rng.integers(1, SIZES["vocab_size"], tokens)
            turns.append({name: seconds(backend, ids) for name, backend in backends.items()})
        times = {name: asdict(Spread.of([1e3 * turn[name] for turn in turns[1:]])) for name in backends}
        ratios = Spread.of([turn["all"] / turn["used"] for turn in turns[1:]])
        medians = {name: f"{spread['median']:.1f} ms" for name, spread in times.items()}
        click.echo(f"{tokens:>3} tokens: {medians}, {ratios.median:.2f}x")
        found.append({"tokens": tokens, "milliseconds": times, "times_faster": asdict(ratios)})
    return found


@click.command()
@click.option("--demo_dir", type=click.Path(path_type=Path), default=Path("demo"), show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")
def main(demo_dir: Path, json_file: Path | None) -> None:
    """See the module."""
    report: dict[str, Any] = {}
    for name, config in MODELS.items():
        click.echo(name)
        with tempfile.TemporaryDirectory() as directory:
            report[name] = compare(config, demo_dir / "hf" / "target", Path(directory))
            engine = open_engine(Path(directory) / "used")
            report["machine"] = json.loads(as_json([], engine, BenchSettings()))["machine"]
    if json_file:
        json_file.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
