"""A hybrid pair beside a dense pair of its size: tokens/s, passes of a round, and memory of a row.

Both have learnt the same texts, and their targets are grown to 16 layers of width 1,024 as the demo's is. In the
hybrid, three of four layers are gated delta nets with the shape that Qwen3.5 gives them, and so is the first of the
draft's two; the dense pair is the demo pair. Pairs are made in --work_dir, once; to train the hybrid takes ten minutes.
A pass of g + 1 tokens follows one in which one draft token of g was accepted, so the hybrid's reads that one again.
Models take turns; medians.

With --peers_dir, which scripts/benchmarks/peers_setup makes, a step of the same targets is timed in llama.cpp, and in
transformers in float32: the time of STEPS tokens behind the same text, with the tokens of a prompt taken away.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import numpy as np
from safetensors import safe_open

from scripts.benchmarks.draft_lengths import ALONE, AUTO, WAYS, measure, output_lens
from scripts.benchmarks.engines import build, to_onnx
from scripts.benchmarks.peers_models import Places, make_gguf
from scripts.benchmarks.peers_systems import LLAMA_CPP_FLOAT32, LlamaCpp, llama_server, worker
from scripts.corpora import sentence_beginnings
from scripts.grow_checkpoint import main as grow_checkpoint
from specrun.backends import open_host_backend
from specrun.devices.processor import describe_processor
from specrun.engine_dir.config import GraphInfo, open_engine

WIDTHS = (1, 2, 3, 5, 9)
LENGTHS = (512, 4096)
"""Tokens of a text, for its memory; passes are timed behind the first."""
BITS = ("float32", "int8", "int4")
PEERS_BITS = {"float32": "float32", "int8": "8 bits", "int4": "4 bits"}
STEPS = 32
SPEEDS = (ALONE, "3", AUTO)
"""The draft lengths at which texts are written."""
TEXTS = 16
ROOT = Path(__file__).parents[2]
SIZES = {"num_layers": 16, "hidden_size": 1024, "intermediate_size": 3072, "num_heads": 16, "num_kv_heads": 4}
KINDS: dict[str, dict[str, int]] = {"hybrid": {**SIZES, "num_linear_heads": 8}, "dense": SIZES}


def make_pair(work: Path, kind: str) -> None:
    """Hugging Face checkpoints of a target and its draft in ``work``/hf, if they are not there yet."""
    pair, target, draft = ROOT / "scripts" / "demo_pair", work / "hf" / kind, work / "hf" / f"{kind}-draft"
    if not draft.exists():
        if kind == "hybrid":
            pair = work / "pair"
            train = [sys.executable, "-m", "scripts.make_demo_pair", "--architecture", "qwen3_5"]
            subprocess.run([*train, "--output_dir", str(pair)], cwd=ROOT, check=True)
        flags = [text for name, size in KINDS[kind].items() for text in (f"--{name}", str(size))]
        flags += ["--max_position_embeddings", str(2 * LENGTHS[-1]), "--dtype", "float32"]
        where = ["--input_dir", str(pair / "target"), "--output_dir", str(target)]
        grow_checkpoint([*where, *flags], standalone_mode=False)
        draft.symlink_to(pair / "draft")


def engine_of(work: Path, model: str, bits: str, ranks: int = 1) -> Path:
    """The engine of a checkpoint, made if it is not there yet."""
    onnx, engine = work / "onnx" / f"{model}-{bits}", work / f"engines-{ranks}" / f"{model}-{bits}"
    if not engine.exists():
        if not onnx.exists():
            form = {"dtype": "float32"} if bits == "float32" else {"qformat": bits}
            to_onnx(work / "hf" / model, onnx, verify=False, **form)
        build(onnx, engine, max_draft_len=10, max_seq_len=LENGTHS[0] + 512, tp_size=ranks)
    return engine


def parameters_of(checkpoint: Path) -> int:
    """How many parameters a checkpoint has."""
    with safe_open(checkpoint / "model.safetensors", "np") as file:
        return sum(int(np.prod(file.get_slice(name).get_shape())) for name in file.keys())  # noqa: SIM118


def tokens_per_second(target: Path, draft: Path) -> dict[str, float]:
    """Of greedy texts one at a time, by draft length."""
    engines = {"target": target, "draft": draft}
    seconds = measure(engines, {name: WAYS[name] for name in SPEEDS}, sentence_beginnings()[:TEXTS], 1)
    tokens = sum(output_lens(TEXTS))
    return {name: tokens / sum(own) for name, own in seconds.items()}


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
@click.option("--work_dir", type=click.Path(path_type=Path), default=Path(".cache/recurrent"), show_default=True)
@click.option("--peers_dir", type=click.Path(path_type=Path), help="What peers_setup made; default: no peers.")
@click.option("--turns", type=click.IntRange(1), default=30, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")
def main(work_dir: Path, peers_dir: Path | None, turns: int, json_file: Path | None) -> None:
    """Make the pairs and measure them."""
    work = work_dir.absolute()
    for kind in KINDS:
        make_pair(work, kind)
    engines = {(kind, bits): engine_of(work, kind, bits) for kind in KINDS for bits in BITS}
    drafts = {kind: engine_of(work, f"{kind}-draft", "float32") for kind in KINDS}
    speeds = {(kind, bits): tokens_per_second(engine, drafts[kind]) for (kind, bits), engine in engines.items()}
    seconds: dict[tuple[str, str, int], list[float]] = {}
    theirs: dict[tuple[str, str, str], list[float]] = {}
    with ExitStack() as opened:
        passes = {key: Passes(engine) for key, engine in engines.items()}
        others = opened.enter_context(peers(Places(peers_dir.absolute(), work, work))) if peers_dir else {}
        for _ in range(turns + 1):
            for runtime, step in others.items():
                theirs.setdefault(runtime, []).append(step())
            for key, one in passes.items():
                one.seconds(1)  # Others have had the processor's caches.
                for width in WIDTHS:
                    seconds.setdefault((*key, width), []).append(one.seconds(width))
    results: list[dict[str, Any]] = []
    for (kind, bits), one in passes.items():
        medians = {width: 1e3 * statistics.median(seconds[kind, bits, width][1:]) for width in WIDTHS}
        results.append(
            {
                "model": kind,
                "parameters": parameters_of(work / "hf" / kind),
                "bits": bits,
                "milliseconds": medians,
                "steps": {width: value / medians[1] for width, value in medians.items()},
                "row_bytes": {n: one.graph.cache_bytes(1, n) + one.graph.state_bytes(1) for n in LENGTHS},
                "tokens_per_second": speeds[kind, bits],
                "peers_step_milliseconds": {
                    runtime: 1e3 * statistics.median(own[1:])
                    for (runtime, *model), own in theirs.items()
                    if model == [kind, bits]
                },
            }
        )
        click.echo(f"{kind} {bits}: {json.dumps(results[-1])}")
    if json_file:
        when = datetime.now(UTC).isoformat(timespec="seconds")
        machine = {"machine": describe_processor(), "date": when, "turns": turns}
        json_file.write_text(json.dumps({**machine, "models": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
