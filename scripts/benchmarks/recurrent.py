"""A hybrid beside a dense model of its size: passes of a round, and memory of a row.

Both have 16 layers of width 1,024 and random weights. In the hybrid, three of four layers are gated delta nets with the
shape that Qwen3.5 gives them; the dense model is Qwen3's. A pass of g + 1 tokens follows one in which one draft token
of g was accepted, so the hybrid's reads that one again. Models take turns; medians.

With --peers_dir, which scripts/benchmarks/peers_setup makes, a step of the same models is timed in llama.cpp, and in
transformers in float32: the time of STEPS tokens behind the same text, with the tokens of a prompt taken away.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from scripts.benchmarks.peers_models import Places, make_gguf
from scripts.benchmarks.peers_systems import LLAMA_CPP_FLOAT32, LlamaCpp, llama_server, worker
from specrun.backends import open_host_backend
from specrun.devices.processor import describe_processor
from specrun.engine_dir.config import GraphInfo, open_engine
from tests.helpers.engines import make_engine, make_onnx

WIDTHS = (1, 2, 3, 5, 9)
LENGTHS = (512, 4096)
"""Tokens of a text, for its memory; passes are timed behind the first."""
BITS = ("float32", "int8", "int4")
PEERS_BITS = {"float32": "float32", "int8": "8 bits", "int4": "4 bits"}
STEPS = 32
TOKENIZER = Path(__file__).parents[1] / "demo_pair" / "target"
"""Whose tokenizer llama.cpp's files get."""
SIZES: dict[str, Any] = {
    "vocab_size": 2048,
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
    for file in TOKENIZER.glob("token*"):
        shutil.copyfile(file, directory / file.name)
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


Step = Callable[[], float]
"""Takes some steps; returns the seconds of one."""


def timed(generate: Callable[[list[list[int]], int, bool], Any]) -> Step:
    """A step of a runtime that writes texts."""
    text = [[3 + place % 1000 for place in range(LENGTHS[0])]]

    def seconds(output_len: int) -> float:
        began = time.perf_counter()
        generate(text, output_len, False)
        return time.perf_counter() - began

    return lambda: (seconds(1 + STEPS) - seconds(1)) / STEPS


@contextmanager
def peers(places: Places) -> Iterator[dict[tuple[str, str, str], Step]]:
    """Steps in other runtimes, by runtime, model and bits."""
    steps: dict[tuple[str, str, str], Step] = {}
    with ExitStack() as opened:
        for name in ("hybrid", "dense"):
            for bits, theirs in PEERS_BITS.items():
                log, options = places.work / f"{name}-{bits}.log", LLAMA_CPP_FLOAT32[False] if bits == "float32" else ()
                server = llama_server(places, make_gguf(places, name, theirs), log, 2 * LENGTHS[0], options)
                steps["llama.cpp", name, bits] = timed(LlamaCpp({False: opened.enter_context(server)}).generate)
            folder = places.demo / "hf" / name
            running = opened.enter_context(worker(places, "transformers", folder, folder, 1))
            steps["transformers", name, "float32"] = timed(running.generate)
        yield steps


@click.command()
@click.option("--peers_dir", type=click.Path(path_type=Path), help="What peers_setup made; default: no peers.")
@click.option("--turns", type=click.IntRange(1), default=30, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")
def main(peers_dir: Path | None, turns: int, json_file: Path | None) -> None:
    """Make the models and measure them."""
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
        work, parameters = Path(folder), dict[str, int]()
        passes: dict[tuple[str, str], Passes] = {}
        for name in ("hybrid", "dense"):
            parameters[name] = save(work / "hf" / name, name == "hybrid")
            for bits in BITS:
                form = {} if bits == "float32" else {"qformat": bits}
                onnx_dir = make_onnx(work / "hf" / name, work / f"{name}-{bits}-onnx", verify=False, **form)
                engine = make_engine(onnx_dir, work / f"{name}-{bits}", max_draft_len=8, max_seq_len=4608)
                passes[name, bits] = Passes(engine)
        others = opened.enter_context(peers(Places(peers_dir.absolute(), work, work))) if peers_dir else {}
        seconds: dict[tuple[str, str, int], list[float]] = {}
        theirs: dict[tuple[str, str, str], list[float]] = {}
        for _ in range(turns + 1):
            for runtime, step in others.items():
                theirs.setdefault(runtime, []).append(step())
            for key, one in passes.items():
                one.seconds(1)  # Others have had the processor's caches.
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
                    "peers_step_milliseconds": {
                        runtime: 1e3 * statistics.median(own[1:])
                        for (runtime, *model), own in theirs.items()
                        if model == [name, bits]
                    },
                }
            )
            steps = ", ".join(
                f"{width}: {value / medians[0]:.2f}" for width, value in zip(WIDTHS, medians, strict=True)
            )
            click.echo(
                f"{name} {bits}: {parameters[name] / 1e6:.0f}M, a step {1e3 * medians[0]:.2f} ms; in steps {steps}; "
                + ", ".join(f"{size / 1e6:.1f} MB at {length}" for length, size in memory.items())
                + f"; peers {results[-1]['peers_step_milliseconds']}"
            )
    if json_file:
        when = datetime.now(UTC).isoformat(timespec="seconds")
        machine = {"machine": describe_processor(), "date": when, "turns": turns}
        json_file.write_text(json.dumps({**machine, "models": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
