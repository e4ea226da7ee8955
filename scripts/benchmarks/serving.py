"""Requests that come and go, on the demo pair: rows that fall free, long prompts, and prompts that begin alike.

Each way against the other, interleaved in one run. Needs what scripts/demo leaves in demo/; engines for batches of 8
are built in a temporary directory.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from pydoc_data.topics import topics

import click

from scripts.benchmarks.engines import build
from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.engine_dir.config import open_engine
from specrun.evaluation.bench import machine_of
from specrun.evaluation.bench_results import Spread
from specrun.request.request import Request
from specrun.sampling.sampler import SamplingParams

ROWS = 8
GREEDY = SamplingParams()
Measured = dict[str, Spread]


def repeat(count: int, **ways: Callable[[], float]) -> Measured:
    """Let the ways take turns; the first turns warm up."""
    found = [{name: way() for name, way in ways.items()} for _ in range(count + 1)][1:]
    return {name: Spread.of(turn[name] for turn in found) for name in ways}


def decode(decoder: SpeculativeDecoder, requests: Sequence[Request]) -> None:
    """Decode to the ends."""
    for _ in decoder.run(requests):
        pass


def rows_that_fall_free(decoder: SpeculativeDecoder, repetitions: int) -> Measured:
    """Tokens/s of 24 texts of 8 to 128 tokens, 8 rows: a new text for each that ends, or batches that end together."""
    generator = random.Random(1)
    lengths = [generator.randint(8, 128) for _ in range(3 * ROWS)]
    prompts = [decoder.tokenizer.encode(text).ids[:24] for text in list(topics.values())[: len(lengths)]]

    def rate(size: int) -> float:
        requests = [Request(prompt, GREEDY, length) for prompt, length in zip(prompts, lengths, strict=True)]
        began = time.perf_counter()
        for first in range(0, len(requests), size):
            decode(decoder, requests[first : first + size])
        return sum(lengths) / (time.perf_counter() - began)

    return repeat(repetitions, continuous=lambda: rate(len(lengths)), batches=lambda: rate(ROWS))


def a_long_prompt(decoder: SpeculativeDecoder, repetitions: int) -> Measured:
    """Longest wait, in milliseconds, between two tokens of a text while a prompt of 440 tokens is read beside it."""
    text = decoder.tokenizer.encode(topics["try"]).ids

    def wait(piece: int) -> float:
        decoder.scheduler.round.prefill_chunk_size = piece
        running, long = Request(text[:8], GREEDY, 96), Request(text[:440], GREEDY, 4)
        gaps, last = [], time.perf_counter()
        for number, event in enumerate(decoder.run([running])):
            gaps.append(time.perf_counter() - last)
            last = time.perf_counter()
            if number == 5 and event.request is running:
                decoder.scheduler.add(long)
        return 1000 * max(gaps[3:])

    usual = decoder.scheduler.round.prefill_chunk_size
    found = repeat(repetitions, in_pieces=lambda: wait(usual), at_once=lambda: wait(10_000))
    decoder.scheduler.round.prefill_chunk_size = usual
    return found


def a_short_prompt(decoder: SpeculativeDecoder, repetitions: int) -> Measured:
    """Milliseconds to the first token of a prompt of 8 tokens that comes while another text runs.

    With one of 440 tokens that came just before it, or without.
    """
    text = decoder.tokenizer.encode(topics["try"]).ids

    def first_token(*before: Request) -> float:
        running, short = Request(text[:8], GREEDY, 96), Request(text[8:16], GREEDY, 4)
        for number, event in enumerate(decoder.run([running])):
            if number == 5 and event.request is running:
                for request in (*before, short):
                    decoder.scheduler.add(request)
        return 1000 * short.stats.first_token_seconds

    return repeat(
        repetitions,
        behind_a_long_one=lambda: first_token(Request(text[:440], GREEDY, 4)),
        by_itself=first_token,
    )


def prompts_that_begin_alike(reusing: SpeculativeDecoder, plain: SpeculativeDecoder, repetitions: int) -> Measured:
    """Milliseconds to the first token behind 384 tokens that all prompts have in common and 16 of their own."""
    text = reusing.tokenizer.encode(topics["try"]).ids
    turn = iter(range(10_000))

    def first_token(decoder: SpeculativeDecoder) -> float:
        # Numbers, so that no two prompts are the same.
        request = Request([*text[:384], *(500 + next(turn) + n for n in range(16))], GREEDY, 1)
        decode(decoder, [request])
        return 1000 * request.stats.first_token_seconds

    return repeat(repetitions, reused=lambda: first_token(reusing), read_again=lambda: first_token(plain))


@click.command()
@click.option("--demo_dir", type=click.Path(path_type=Path), default=Path("demo"), show_default=True)
@click.option("--repetitions", type=int, default=3, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")
def main(demo_dir: Path, repetitions: int, json_file: Path | None) -> None:
    """Measure what the scheduler and kept prefixes are worth."""
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        for role in ("target", "draft"):
            build(demo_dir / "onnx" / role, work / role, max_batch_size=ROWS, max_input_len=450)
        pair = (work / "target", work / "draft")
        with (
            SpeculativeDecoder.open(*pair, DraftTargetConfig(reuse_blocks=False)) as plain,
            SpeculativeDecoder.open(*pair) as reusing,
        ):
            found = {
                "rows that fall free, tokens/s": rows_that_fall_free(plain, repetitions),
                "a long prompt, longest wait in ms": a_long_prompt(plain, repetitions),
                "a short prompt beside a running text, ms to the first token": a_short_prompt(plain, repetitions),
                "a common beginning, ms to the first token": prompts_that_begin_alike(reusing, plain, repetitions),
            }
        machine = machine_of(open_engine(work / "target"))
    for what, ways in found.items():
        click.echo(what)
        for name, spread in ways.items():
            click.echo(f"  {name:17} {spread.median:8.1f}  ({spread.lowest:.1f}..{spread.highest:.1f})")
    if json_file:
        figures = {what: {name: asdict(spread) for name, spread in ways.items()} for what, ways in found.items()}
        json_file.write_text(json.dumps({"machine": machine, "results": figures}, indent=2) + "\n")


if __name__ == "__main__":
    main()
