"""specrun beside OpenVINO GenAI, llama.cpp, onnxruntime-genai and transformers: the same pair, processor and bits.

Needs what scripts/demo leaves in demo/, and what scripts/benchmarks/peers_setup makes. They take turns within one run;
each keeps a process of its own with its models loaded, and two threads. Prompts are given as tokens, texts are greedy,
stop ids are ignored. A speed is wall time as the caller sees it: prompts, and for the peers the way to their process
and back (below a millisecond a text), are in it. All models' files are locked in memory meanwhile. A turn is measured
again where other processes took more than a share of the processor.

With --batch_size N, N texts decode at the same time, and a speed is that of all of them; onnxruntime-genai and
transformers are then left out, as their drafts are for one text. transformers runs in float32 alone. A draft has the
target's form, but 8 bits beside a target in 4 bits. Other settings are those that each has by default; with float32
the peers' caches are float32 too. Quality is as in quantized.py. Models and logits are kept in --work_dir, so
--repetitions 0 prepares what a later run measures.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import numpy as np
import numpy.typing as npt
from scipy.special import log_softmax

from scripts.benchmarks.peers_models import BITS, Places, call, make
from scripts.benchmarks.peers_systems import AUTO, DRAFT_LEN, OPENVINO_FLOAT32, THREADS, System, systems
from scripts.benchmarks.prompts import PROMPTS
from scripts.benchmarks.quantized import Floats, log_probs, quality, unseen_texts
from specrun.decoder import SpeculativeDecoder
from specrun.engine_dir.config import open_engine
from specrun.evaluation.bench import machine_of
from specrun.evaluation.bench_results import Spread

WAYS = ("alone", "with_draft")
NUM_PROMPTS = 4
MOST_OTHERS = 0.05
"""Share of the processor that others may take in a turn that counts."""
MOST_TURNS = 5
"""Turns that are begun for each that counts."""


def seconds_of_others() -> float:
    """Processor time that processes other than this one and its children have had since the machine started."""
    own = os.getpid()
    children = Path(f"/proc/{own}/task/{own}/children").read_text().split()
    stats = [Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split() for process in (own, *children)]
    every = Path("/proc/stat").read_text().split()[1:4]
    ticks = sum(map(int, every)) - sum(int(stat[11]) + int(stat[12]) for stat in stats)
    return ticks / os.sysconf("SC_CLK_TCK")


def measure(
    found: dict[str, System], prompts: list[list[int]], batch_size: int, output_len: int, repetitions: int
) -> dict[str, Any]:
    """Tokens/s of all, alone and with the draft, in turns; the first turn warms up.

    And of how many prompts the text with the draft is the text without it.
    """
    ways = [(name, False) for name in found if name != AUTO] + [(name, True) for name in found]
    turns: list[dict[tuple[str, bool], float]] = []
    texts: dict[tuple[str, bool], list[list[int]]] = {}

    def take_turn() -> float:
        """Returns the share of the processor that others took."""
        turns.append({})
        others, started = seconds_of_others(), time.perf_counter()
        for name, drafted in ways:
            began = time.perf_counter()
            batches = (prompts[first : first + batch_size] for first in range(0, len(prompts), batch_size))
            written = (found[name].generate(batch, output_len, drafted) for batch in batches)
            texts[name, drafted] = [text for batch in written for text in batch]
            turns[-1][name, drafted] = len(prompts) * output_len / (time.perf_counter() - began)
            if lengths := {len(text) for text in texts[name, drafted]} - {output_len}:
                raise click.ClickException(f"{name}: texts of {lengths} tokens, expected {output_len}")
        return (seconds_of_others() - others) / (time.perf_counter() - started) / (os.cpu_count() or 1)

    take_turn()
    turns.clear()
    for _ in range(MOST_TURNS * repetitions):
        if len(turns) == repetitions:
            break
        share = take_turn()
        click.echo(f"turn {len(turns)} of {repetitions}: others {share:.0%}, {turns[-1]}", err=True)
        if share > MOST_OTHERS:
            turns.pop()
    if len(turns) < repetitions:
        raise click.ClickException("the machine is too busy with other work")

    def speed(name: str, drafted: bool) -> dict[str, Any]:
        own = [turn[name, drafted] for turn in turns]
        ratios = [turn["specrun", drafted] / turn[name, drafted] for turn in turns]
        return {"tokens_per_second": asdict(Spread.of(own)), "specrun_by_this": asdict(Spread.of(ratios))}

    def same(one: tuple[str, bool], other: tuple[str, bool]) -> int:
        return sum(a == b for a, b in zip(texts[one], texts[other], strict=True))

    results: dict[str, Any] = {name: {"with_draft": speed(name, True)} for name in found}
    for name in found:
        if name != AUTO:
            results[name]["alone"] = speed(name, False)
            results[name]["texts_equal_to_alone"] = same((name, True), (name, False))
            results[name]["texts_equal_to_specruns"] = same((name, False), ("specrun", False))
    return results


def predictions(places: Places, bits: str, texts: npt.NDArray[np.int64]) -> dict[str, Floats]:
    """[n, S - 1, V] log-probabilities of all three targets."""
    np.save(places.work / "texts.npy", texts)

    def peer(name: str, command: str, *options: str) -> Floats:
        model = places.made(name, "target", bits)
        if not (out := model.with_name(f"{model.name}.npy")).exists():
            package, library = places.peers / "llama-cpp-python", places.peers / "build/bin"
            arguments = (command, model, places.work / "texts.npy", out, *options)
            call(places.python(*arguments), PYTHONPATH=str(package), LLAMA_CPP_LIB_PATH=str(library))
        return np.asarray(log_softmax(np.load(out)[:, :-1], axis=-1))

    engine = places.made("specrun", "target", bits)
    if not (own := engine.with_name(f"{engine.name}.npy")).exists():
        np.save(own, log_probs(engine, texts))
    return {
        "specrun": np.load(own),
        "OpenVINO GenAI": peer("openvino", "openvino_logits", *(OPENVINO_FLOAT32 if bits == "float32" else ())),
        "llama.cpp": peer("llama.cpp", "llama_cpp_logits"),
    }


def weight_bytes(places: Places, bits: str) -> dict[str, int]:
    """Of all three targets' weight files."""
    return {
        "specrun": open_engine(places.made("specrun", "target", bits)).weight_bytes,
        "OpenVINO GenAI": (places.made("openvino", "target", bits) / "openvino_model.bin").stat().st_size,
        "llama.cpp": places.made("llama.cpp", "target", bits).stat().st_size,
    }


def versions(places: Places) -> dict[str, str]:
    """Of the peers."""
    python = places.python("versions")
    found: dict[str, str] = json.loads(subprocess.run(python, capture_output=True, text=True, check=True).stdout)
    server = [str(places.peers / "build/bin/llama-server"), "--version"]
    said = subprocess.run(server, capture_output=True, text=True, check=True)
    lines = [line for line in (said.stdout + said.stderr).splitlines() if line.startswith(("version", "built"))]
    package = (places.peers / "llama-cpp-python").resolve().name
    return found | {"llama.cpp": ", ".join([f"source of {package}", *lines])}


@click.command()
@click.option("--peers_dir", type=click.Path(path_type=Path), required=True, help="What peers_setup made.")
@click.option("--work_dir", type=click.Path(path_type=Path), required=True, help="Models are kept here; 6 GB.")
@click.option("--demo_dir", type=click.Path(path_type=Path), default=Path("demo"), show_default=True)
@click.option("--prompts_file", type=click.Path(path_type=Path), help="JSON lines with text; default: the demo's.")
@click.option("--bits", "rows", type=click.Choice(list(BITS)), multiple=True, default=list(BITS), show_default=True)
@click.option("--batch_size", type=int, default=1, show_default=True)
@click.option("--output_len", type=int, default=64, show_default=True)
@click.option("--repetitions", type=int, default=5, show_default=True, help="0: only prepare.")
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here; rows of other bits stay."
)
def main(
    peers_dir: Path,
    work_dir: Path,
    demo_dir: Path,
    prompts_file: Path | None,
    rows: tuple[str, ...],
    batch_size: int,
    output_len: int,
    repetitions: int,
    json_file: Path | None,
) -> None:
    """Compare specrun with its peers on a CPU."""
    places = Places(peers_dir.absolute(), demo_dir.absolute(), work_dir.absolute(), batch_size)
    for bits in ("float32", *rows):
        for role in ("target", "draft"):
            make(places, role, BITS[bits].draft if role == "draft" else bits)
    results: dict[str, Any] = {}
    base_engine = places.made("specrun", "target", "float32")
    with SpeculativeDecoder.open(base_engine) as decoder:
        texts = unseen_texts(decoder)
        lines = prompts_file.read_text().splitlines() if prompts_file else []
        chosen = ([json.loads(line)["text"] for line in lines] or PROMPTS)[:NUM_PROMPTS]
        prompts = [[int(token) for token in decoder.tokenizer.encode(text).ids] for text in chosen]
    base = predictions(places, "float32", texts)["specrun"]
    for bits in rows:
        found = predictions(places, bits, texts)
        sizes = weight_bytes(places, bits)
        results[bits] = {
            name: {"weight_bytes": sizes[name], "quality": asdict(quality(own, base, texts))}
            for name, own in found.items()
        }
        click.echo(f"{bits}: {results[bits]}")
    for bits in rows if repetitions else ():
        with systems(places, bits) as running:
            for name, figures in measure(running, prompts, batch_size, output_len, repetitions).items():
                results[bits].setdefault(name, {}).update(figures)
                speeds = [f"{way} {figures[way]['tokens_per_second']['median']:.1f}" for way in WAYS if way in figures]
                click.echo(f"{bits:>8} {name:<15} {', '.join(speeds)}")
    if json_file:
        machine = machine_of(open_engine(base_engine)) | {"threads": THREADS}
        about = {"machine": machine, "versions": versions(places), "batch_size": batch_size}
        about |= {"draft_len": DRAFT_LEN, "output_len": output_len}
        others = json.loads(json_file.read_text())["results"] if json_file.exists() else {}
        json_file.write_text(json.dumps({**about, "results": others | results}, indent=2) + "\n")


if __name__ == "__main__":
    main()
