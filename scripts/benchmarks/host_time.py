#!/usr/bin/env python3
"""Time outside the engines, per round: specrun's, and that of a bare loop over the same engine calls. They take turns.

The bare loop takes the largest logit, writes one number and calls the engine, and does nothing else: no scheduler,
requests, text ends, sampling or errors. What it takes behind an engine of hundreds of megabytes, whose weights push
everything else out of the processor's caches, no loop in Python goes below; behind small engines both cost what they
compute. Needs what scripts/demo leaves in demo/ and .cache/; engines are built in a temporary directory.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import click
from engines import build
from rich.console import Console

from specbuild.convert import ConvertOptions, convert
from specbuild.progress import Stages
from specrun.bench import Settings, as_json
from specrun.bench_results import Spread
from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.engine_dir import open_engine
from specrun.request import Request
from specrun.rounds.host import HostRound
from specrun.sampling import SamplingParams

PROMPT = "The try statement"
DRAFT_LEN = 4
WARM = SamplingParams(temperature=0.8, seed=1)
WAYS = {"greedy": (SamplingParams(), False), "sampled, tokens": (WARM, False), "sampled, logits": (WARM, True)}


def bare(rounds: HostRound, prompt: list[int], length: int) -> list[float]:
    """Greedy text of ``length`` tokens by engine calls alone; returns each round's seconds outside the engines."""
    assert rounds.draft
    for runner in rounds.runners:
        runner.reserve(1, len(prompt) + length + 2 * DRAFT_LEN)
        runner.forward([prompt[:-1]], [1])
    first, step = (rounds.draft.backend.bind(0, 1, width, 1) for width in (2, 1))
    verify = rounds.target.backend.bind(0, 1, DRAFT_LEN + 1, DRAFT_LEN + 1)
    first.logits_indices[0, 0] = 1
    verify.logits_indices[0] = range(DRAFT_LEN + 1)
    tokens, found, inside = list(prompt), [], 0.0
    began = time.perf_counter()

    def run(run: Callable[[], None]) -> None:
        nonlocal inside
        before = time.perf_counter()
        run()
        inside += time.perf_counter() - before

    while len(tokens) < len(prompt) + length:
        end = len(tokens)
        first.input_ids[0] = tokens[-2:]
        first.write_indices[0] = end - 2
        run(first.run)
        drafts = [int(first.logits[0, 0].argmax())]
        while len(drafts) < DRAFT_LEN:
            step.input_ids[0, 0] = drafts[-1]
            step.write_indices[0] = end + len(drafts) - 1
            run(step.run)
            drafts.append(int(step.logits[0, 0].argmax()))
        verify.input_ids[0] = [tokens[-1], *drafts]
        verify.write_indices[0] = end - 1
        run(verify.run)
        choices = verify.logits[0].argmax(-1).tolist()
        accepted = next((i for i, draft in enumerate(drafts) if draft != choices[i]), DRAFT_LEN)
        tokens += choices[: accepted + 1]
        now = time.perf_counter()
        found.append(now - began - inside)
        began, inside = now, 0.0
    return found[1:]


def ours(decoder: SpeculativeDecoder, prompt: list[int], length: int, params: SamplingParams) -> list[float]:
    """A text by specrun; returns each round's seconds outside the engines."""
    runners, found = decoder.scheduler.round.runners, []  # type: ignore[attr-defined]
    before = None
    for _ in decoder.run([Request(prompt, params, length)]):
        now = time.perf_counter() - sum(runner.seconds for runner in runners)
        if before is not None:
            found.append(now - before)
        before = now
    return found[1:]


def measure(target: Path, draft: Path, length: int, repetitions: int) -> dict[str, Spread]:
    """Microseconds a round: the median of each text's rounds, from the lowest to the highest of the repetitions."""
    found: dict[str, list[float]] = {}
    configs = {use: DraftTargetConfig(draft_len=DRAFT_LEN, use_logits=use, reuse_blocks=False) for use in (False, True)}
    for use_logits, config in configs.items():
        with SpeculativeDecoder.open(target, draft, config) as decoder:
            rounds = decoder.scheduler.round
            assert isinstance(rounds, HostRound)
            prompt = decoder.tokenizer.encode(PROMPT).ids
            for turn in range(repetitions + 1):  # The first warms up.
                texts = {} if use_logits else {"bare loop, greedy": bare(rounds, prompt, length)}
                for name, (params, by_logits) in WAYS.items():
                    if by_logits == use_logits:
                        texts[name] = ours(decoder, prompt, length, params)
                for name, seconds in texts.items() if turn else ():
                    found.setdefault(name, []).append(1e6 * statistics.median(seconds))
    return {name: Spread.of(values) for name, values in found.items()}


def small_pair(pair: Path, work: Path) -> dict[str, Path]:
    """Engines of the trained pair before it was grown: about a million parameters each."""
    for role in ("target", "draft"):
        options = ConvertOptions(model=str(pair / role), output_dir=work / "onnx" / role)
        convert(options, Stages(Console(quiet=True)))
    return engines(work / "onnx", work / "small")


def engines(onnx: Path, work: Path) -> dict[str, Path]:
    """Engines of both checkpoints in ``onnx``."""
    found = {role: work / role for role in ("target", "draft")}
    work.mkdir()
    for role, directory in found.items():
        build(onnx / role, directory, max_batch_size=1, max_input_len=64)
    return found


@click.command()
@click.option("--demo_dir", type=click.Path(path_type=Path), default=Path("demo"), show_default=True)
@click.option("--pair_dir", type=click.Path(path_type=Path), default=Path(".cache/pair"), show_default=True)
@click.option("--output_len", type=int, default=200, show_default=True)
@click.option("--repetitions", type=int, default=5, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")
def main(demo_dir: Path, pair_dir: Path, output_len: int, repetitions: int, json_file: Path | None) -> None:
    """Measure the loop's own time."""
    found = {}
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        pairs = {"demo pair": engines(demo_dir / "onnx", work / "demo"), "small pair": small_pair(pair_dir, work)}
        for pair, directories in pairs.items():
            results = measure(**directories, length=output_len, repetitions=repetitions)
            for way, spread in results.items():
                click.echo(f"{pair:12} {way:20} {spread.median:6.0f} us ({spread.lowest:.0f} to {spread.highest:.0f})")
            found[pair] = {way: asdict(spread) for way, spread in results.items()}
        settings = Settings((1,), (DRAFT_LEN,), output_len, repetitions)
        machine = json.loads(as_json([], open_engine(pairs["demo pair"]["target"]), settings))
    if json_file:
        json_file.write_text(json.dumps({**machine, "results": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
