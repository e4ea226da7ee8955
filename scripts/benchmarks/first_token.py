"""A model beside OpenVINO GenAI and llama.cpp: seconds to the first token of a prompt, and the speed behind it.

The model is that of --model_dir, or one of the shape of Qwen2.5-1.5B with random weights: what it writes means nothing,
and takes as long as the real one's texts. It is alone, one text at a time, two threads. All take turns; medians. By
default OpenVINO computes in bfloat16 where the processor can, with keys and values in 8 bits; it is measured in float32
too. Needs what scripts/benchmarks/peers_setup makes, and up to 15 GB in --work_dir, where models are kept.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import numpy as np
from transformers import Qwen2Config

from scripts.benchmarks.engines import build, random_checkpoint, to_onnx
from scripts.benchmarks.peers_models import BITS, Places, make_gguf, make_openvino
from scripts.benchmarks.peers_systems import OPENVINO_FLOAT32, LlamaCpp, Specrun, System, llama_server, worker
from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.devices.processor import describe_processor
from specrun.evaluation.bench_results import Spread

TOKENIZER = Path(__file__).parents[1] / "demo_pair" / "target"
POSITIONS = 4096
OPENVINO = {"OpenVINO GenAI": (), "OpenVINO GenAI, computing in float32": OPENVINO_FLOAT32}
"""Settings of each."""
LLAMA_CPP = "llama.cpp"
OUTPUT_LEN = 33
"""The first token is timed alone, and the others together."""


def make(places: Places, bits: str, model: Path | None, peers: Sequence[str]) -> None:
    """The model for specrun and its peers, where it is not there yet. model: None: a random one."""
    source = places.demo / "hf" / "target"
    if model and not source.exists():
        source.parent.mkdir(parents=True, exist_ok=True)
        source.symlink_to(model.absolute())
    if not source.exists():
        config = Qwen2Config(
            hidden_size=1536,
            intermediate_size=8960,
            num_hidden_layers=28,
            num_attention_heads=12,
            num_key_value_heads=2,
            vocab_size=151_936,
            tie_word_embeddings=True,
            max_position_embeddings=POSITIONS,
            initializer_range=0.03,
            dtype="bfloat16",
        )
        random_checkpoint(config, TOKENIZER, source)
    if not (engine := places.made("specrun", "target", bits)).exists():
        onnx = to_onnx(source, places.work / "onnx" / engine.name, qformat=BITS[bits].specrun, verify=False)
        build(onnx, engine, max_seq_len=POSITIONS, max_input_len=POSITIONS - 1)
    if not OPENVINO.keys().isdisjoint(peers):
        make_openvino(places, "target", bits)
    if LLAMA_CPP in peers:
        make_gguf(places, "target", bits)


def measure(found: dict[str, System], prompts: list[list[int]], turns: int) -> list[dict[str, Any]]:
    """Seconds to the first token and tokens/s behind it, by prompt and system. The first turn warms up."""
    seconds: dict[tuple[int, str], list[tuple[float, float]]] = {}
    for turn in range(turns + 1):
        for prompt in prompts:
            for name, system in found.items():
                times = []
                for output_len in (1, OUTPUT_LEN):
                    began = time.perf_counter()
                    system.generate([prompt], output_len, False)
                    times.append(time.perf_counter() - began)
                seconds.setdefault((len(prompt), name), []).append((times[0], times[1] - times[0]))
                click.echo(f"turn {turn}, {len(prompt)} tokens, {name}: {times}", err=True)
    return [
        {
            "prompt_tokens": length,
            "system": name,
            "first_token_seconds": asdict(Spread.of([first for first, _ in own[1:]])),
            "tokens_per_second": (OUTPUT_LEN - 1) / statistics.median(others for _, others in own[1:]),
        }
        for (length, name), own in seconds.items()
    ]


@click.command()
@click.option("--peers_dir", type=click.Path(path_type=Path), required=True, help="What peers_setup made.")
@click.option("--work_dir", type=click.Path(path_type=Path), required=True, help="Models are kept here.")
@click.option("--model_dir", type=click.Path(path_type=Path), help="A model in place of the random one.")
@click.option(
    "--peer",
    "peers",
    type=click.Choice([*OPENVINO, LLAMA_CPP]),
    multiple=True,
    default=[*OPENVINO, LLAMA_CPP],
    show_default=True,
)
@click.option("--bits", "rows", type=click.Choice(list(BITS)), multiple=True, default=["8 bits", "4 bits"])
@click.option("--prompt_len", "lengths", type=int, multiple=True, default=[16, 512], show_default=True)
@click.option("--turns", type=click.IntRange(1), default=3, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")
def main(
    peers_dir: Path,
    work_dir: Path,
    model_dir: Path | None,
    peers: tuple[str, ...],
    rows: tuple[str, ...],
    lengths: tuple[int, ...],
    turns: int,
    json_file: Path | None,
) -> None:
    """Measure specrun beside its peers."""
    work = work_dir.absolute()
    places = Places(peers_dir.absolute(), work, work)
    random = np.random.default_rng(0)
    prompts = [[int(token) for token in random.integers(300, 2000, length)] for length in lengths]
    results: dict[str, Any] = {}
    for bits in rows:
        make(places, bits, model_dir, peers)
        with ExitStack() as opened:
            config = DraftTargetConfig(reuse_blocks=False)
            decoder = opened.enter_context(
                SpeculativeDecoder.open(places.made("specrun", "target", bits), None, config)
            )
            found: dict[str, System] = {"specrun": Specrun(decoder, 0)}
            for name in (name for name in OPENVINO if name in peers):
                ir = places.made("openvino", "target", bits)
                found[name] = opened.enter_context(worker(places, "openvino", ir, "-", 1, *OPENVINO[name]))
            if LLAMA_CPP in peers:
                model, log = places.made("llama.cpp", "target", bits), work / "llama-server.log"
                server = opened.enter_context(llama_server(places, model, log, POSITIONS))
                found[LLAMA_CPP] = LlamaCpp({False: server})
            results[bits] = measure(found, prompts, turns)
        for row in results[bits]:
            click.echo(f"{bits}: {row}")
    if json_file:
        when = datetime.now(UTC).isoformat(timespec="seconds")
        machine = {"machine": describe_processor(), "date": when, "turns": turns}
        json_file.write_text(json.dumps({**machine, "results": results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
