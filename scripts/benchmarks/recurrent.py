"""A hybrid beside a dense model of its size: passes of a round, and memory of a row.

Both have 16 layers of width 1,024 and random weights. In the hybrid, three of four layers are gated delta nets with the
shape that Qwen3.5 gives them; the dense model is Qwen3's. A pass of g + 1 tokens follows one in which one draft token
of g was accepted, so the hybrid's reads that one again. Models take turns; medians.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from specrun.backends import open_host_backend
from specrun.devices.processor import describe_processor
from specrun.engine_dir.config import GraphInfo, open_engine
from tests.helpers.engines import make_engine, make_onnx

WIDTHS = (1, 2, 3, 5, 9)
LENGTHS = (512, 4096)
"""Tokens of a text, for its memory; passes are timed behind the first."""
BITS = ("float32", "int8", "int4")
SIZES: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
DELTA: dict[str, Any] = {
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 4,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}


def save(directory: Path, hybrid: bool) -> int:
    """Write a checkpoint; returns how many parameters it has."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen3_5TextConfig(**SIZES, **DELTA) if hybrid else transformers.Qwen3Config(**SIZES)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(directory)
    return int(sum(parameter.numel() for parameter in model.parameters()))


class Passes:
    """An engine whose passes are timed."""

    def __init__(self, directory: Path) -> None:
        config = open_engine(directory)
        self.graph: GraphInfo = config.graph
        self.backend = open_host_backend(directory, config, 0)
        self.backend.resize(1, LENGTHS[0] + 64, 0)

    def seconds(self, width: int) -> float:
        """Of a pass of ``width`` tokens."""
        step = self.backend.bind(0, 1, width, width)
        step.input_ids[...] = np.arange(width) + 3
        step.write_indices[...] = LENGTHS[0]
        step.logits_indices[...] = np.arange(width)
        step.state_indices[...] = LENGTHS[0] - (width > 1)
        step.keep_indices[...] = LENGTHS[0] + 1
        began = time.perf_counter()
        step.run()
        return time.perf_counter() - began


@click.command()
@click.option("--turns", type=click.IntRange(1), default=30, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")
def main(turns: int, json_file: Path | None) -> None:
    """Make the models and measure them."""
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        work, parameters = Path(folder), dict[str, int]()
        passes: dict[tuple[str, str], Passes] = {}
        for name in ("hybrid", "dense"):
            parameters[name] = save(work / name, name == "hybrid")
            for bits in BITS:
                form = {} if bits == "float32" else {"qformat": bits}
                onnx_dir = make_onnx(work / name, work / f"{name}-{bits}-onnx", verify=False, **form)
                engine = make_engine(onnx_dir, work / f"{name}-{bits}", max_draft_len=8, max_seq_len=4608)
                passes[name, bits] = Passes(engine)
        seconds: dict[tuple[str, str, int], list[float]] = {}
        for _ in range(turns + 1):
            for key, one in passes.items():
                for width in WIDTHS:
                    seconds.setdefault((*key, width), []).append(one.seconds(width))
        for (name, bits), one in passes.items():
            medians = [statistics.median(seconds[name, bits, width][1:]) for width in WIDTHS]
            memory = {n: one.graph.cache_bytes(1, n) + one.graph.state_bytes(1) for n in LENGTHS}
            results.append(
                {
                    "model": name,
                    "parameters": parameters[name],
                    "bits": bits,
                    "milliseconds": dict(zip(WIDTHS, (1e3 * value for value in medians), strict=True)),
                    "steps": dict(zip(WIDTHS, (value / medians[0] for value in medians), strict=True)),
                    "row_bytes": memory,
                }
            )
            steps = ", ".join(
                f"{width}: {value / medians[0]:.2f}" for width, value in zip(WIDTHS, medians, strict=True)
            )
            click.echo(
                f"{name} {bits}: {parameters[name] / 1e6:.0f}M, a step {1e3 * medians[0]:.2f} ms; in steps {steps}; "
                + ", ".join(f"{size / 1e6:.1f} MB at {length}" for length, size in memory.items())
            )
    if json_file:
        when = datetime.now(UTC).isoformat(timespec="seconds")
        machine = {"machine": describe_processor(), "date": when, "turns": turns}
        json_file.write_text(json.dumps({**machine, "models": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
