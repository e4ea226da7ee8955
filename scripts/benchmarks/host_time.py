"""Time outside the engines, per round: specrun's, and that of a bare loop over the same engine calls. They take turns.

The bare loop takes the largest logit, writes one number and calls the engine, and does nothing else: no scheduler,
requests, text ends, sampling or errors. What it takes behind an engine of hundreds of megabytes, whose weights push
everything else out of the processor's caches, no loop in Python goes below; behind small engines both cost what they
compute. The wide pair has the shape and vocabulary of Qwen2.5-0.5B and random weights: what sampling takes follows the
vocabulary. Needs what scripts/demo leaves in demo/; the heads need what scripts/demo --kinds leaves there, and are left
out where it is not. Engines are built in a temporary directory.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import click
from transformers import Qwen2Config

from scripts.benchmarks.engines import build, random_checkpoint, to_onnx
from specrun.config import DraftKind, DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.drafters.model import ModelDrafter
from specrun.engine_dir.config import open_engine
from specrun.evaluation.bench import as_json
from specrun.evaluation.bench_results import Spread
from specrun.evaluation.bench_settings import BenchSettings
from specrun.request.request import Request
from specrun.sampling.sampler import SamplingParams
from specrun.speculative.host_round import HostRound

PROMPT = "The try statement"
DRAFT_LEN = 4
WARM = SamplingParams(temperature=0.8, seed=1)
NUCLEUS = SamplingParams(temperature=0.8, top_p=0.9, seed=1)
WAYS = {
    "greedy": (SamplingParams(), False),
    "sampled, tokens": (WARM, False),
    "top_p 0.9, tokens": (NUCLEUS, False),
    "sampled, logits": (WARM, True),
    "top_p 0.9, logits": (NUCLEUS, True),
}

SMALL_PAIR = Path(__file__).parents[1] / "demo_pair"
PAIRS = ("demo pair", "EAGLE-3", "suffix", "small pair", "wide pair")

Times = list[tuple[float, float]]
"""Each round's seconds outside and inside the engines."""


def bare(rounds: HostRound, prompt: list[int], length: int) -> Times:
    """Greedy text of ``length`` tokens by engine calls alone."""
    drafter = rounds.drafter
    assert isinstance(drafter, ModelDrafter)
    for runner in (rounds.target, drafter.runner):
        runner.reserve(1, len(prompt) + length + 2 * DRAFT_LEN)
        runner.forward([prompt[:-1]], [1])
    first, step = (drafter.runner.backend.bind(0, 1, width, 1) for width in (2, 1))
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
        found.append((now - began - inside, inside))
        began, inside = now, 0.0
    return found[1:]


def ours(decoder: SpeculativeDecoder, prompt: list[int], length: int, params: SamplingParams) -> Times:
    """A text by specrun."""
    rounds = decoder.scheduler.round
    clocks = []
    for _ in decoder.run([Request(prompt, params, length)]):
        times = rounds.engine_times()
        inside = times.target_seconds + times.draft_seconds if times else 0.0
        clocks.append((time.perf_counter() - inside, inside))
    return [(now[0] - then[0], now[1] - then[1]) for then, now in pairwise(clocks[1:])]


def measure(
    target: Path, draft: Path | None, lookup: DraftKind | None, length: int, repetitions: int
) -> dict[str, list[Spread]]:
    """Microseconds outside the engines a round, and their share of it: medians of each text's rounds."""
    found: dict[str, list[tuple[float, float]]] = {}
    plain = DraftTargetConfig(draft_len=DRAFT_LEN, reuse_blocks=False, shared_thread_pool=True, draft=lookup)
    configs = {use: replace(plain, use_logits=use) for use in (False, True)}
    for use_logits, config in configs.items():
        with SpeculativeDecoder.open(target, draft, config) as decoder:
            rounds = decoder.scheduler.round
            assert isinstance(rounds, HostRound)
            prompt = decoder.tokenizer.encode(PROMPT).ids
            for turn in range(repetitions + 1):  # The first warms up.
                is_bare = type(rounds.drafter) is ModelDrafter and not use_logits
                texts = {"bare loop, greedy": bare(rounds, prompt, length)} if is_bare else {}
                for name, (params, by_logits) in WAYS.items():
                    if by_logits == use_logits:
                        texts[name] = ours(decoder, prompt, length, params)
                for name, times in texts.items() if turn else ():
                    microseconds = 1e6 * statistics.median(outside for outside, _ in times)
                    share = statistics.median(outside / (outside + inside) for outside, inside in times)
                    found.setdefault(name, []).append((microseconds, share))
    return {name: [Spread.of(values) for values in zip(*turns, strict=True)] for name, turns in found.items()}


def wide_pair(tokenizer: Path, work: Path) -> Path:
    """Checkpoints of random weights: the shape of Qwen2.5-0.5B, and a draft of two narrow layers."""
    shapes: dict[str, dict[str, Any]] = {
        "target": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
        "draft": {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 2},
    }
    for role, shape in shapes.items():
        config = Qwen2Config(
            **shape,
            num_key_value_heads=2,
            vocab_size=151_936,
            tie_word_embeddings=True,
            initializer_range=3 / math.sqrt(shape["hidden_size"]),  # Logits spread by 3, about as trained ones do.
        )
        random_checkpoint(config, tokenizer, work / role)
    return work


def converted(pair: Path, work: Path) -> Path:
    """ONNX checkpoints of both checkpoints in ``pair``."""
    for role in ("target", "draft"):
        to_onnx(pair / role, work / role)
    return work


class Pair(NamedTuple):
    """What is measured: ONNX checkpoints, what drafts without one, and how long texts are."""

    target: Path
    draft: Path | None
    lookup: DraftKind | None
    length: int


def engines(pair: Pair, work: Path) -> tuple[Path, Path | None]:
    """Engines of a pair's checkpoints."""
    work.mkdir()
    build(pair.target, work / "target", max_batch_size=1, max_input_len=64)
    if pair.draft is None:
        return work / "target", None
    build(pair.draft, work / "draft", max_batch_size=1, max_input_len=64)
    return work / "target", work / "draft"


def pairs(demo: Path, work: Path, names: tuple[str, ...], output_len: int) -> dict[str, Pair]:
    """Those with these names; the small ones are made in ``work``."""
    onnx, kinds = demo / "onnx", demo / "kinds" / "onnx"
    found = {
        "demo pair": Pair(onnx / "target", onnx / "draft", None, output_len),
        "EAGLE-3": Pair(kinds / "eagle3_target", kinds / "eagle3", None, output_len),
        "suffix": Pair(onnx / "target", None, "suffix", output_len),
    }
    if "small pair" in names:
        small = converted(SMALL_PAIR, work / "small_onnx")
        found["small pair"] = Pair(small / "target", small / "draft", None, output_len)
    if "wide pair" in names:
        wide = converted(wide_pair(SMALL_PAIR / "target", work / "wide"), work / "wide_onnx")
        found["wide pair"] = Pair(wide / "target", wide / "draft", None, output_len // 5)
    return {name: pair for name, pair in found.items() if name in names}


@click.command()
@click.option("--demo_dir", type=click.Path(path_type=Path), default=Path("demo"), show_default=True)
@click.option("--pair", "names", type=click.Choice(PAIRS), multiple=True, default=PAIRS, show_default=True)
@click.option("--output_len", type=int, default=200, show_default=True)
@click.option("--repetitions", type=int, default=5, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")
def main(
    demo_dir: Path,
    names: tuple[str, ...],
    output_len: int,
    repetitions: int,
    json_file: Path | None,
) -> None:
    """Measure the loop's own time."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        for pair, each in pairs(demo_dir, work, names, output_len).items():
            if not each.target.is_dir():
                click.echo(f"{pair}: left out; scripts/demo --kinds makes {each.target}", err=True)
                continue
            directories = engines(each, work / pair)
            results = measure(*directories, each.lookup, length=each.length, repetitions=repetitions)
            for way, (us, share) in results.items():
                spread = f"{us.median:6.0f} us ({us.lowest:.0f} to {us.highest:.0f})"
                click.echo(f"{pair:12} {way:20} {spread:24} {share.median:.1%} of a round")
            found[pair] = {
                way: {"microseconds": asdict(us), "share": asdict(share)} for way, (us, share) in results.items()
            }
            if json_file:
                settings = BenchSettings((1,), (DRAFT_LEN,), output_len, repetitions)
                about = json.loads(as_json([], open_engine(directories[0]), settings))
                json_file.write_text(json.dumps({**about, "results": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
