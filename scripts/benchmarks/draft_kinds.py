#!/usr/bin/env python3
"""Every kind of draft on texts that are new, that were asked for before, and that resemble their own prompt.

All kinds take turns in one run, with --draft_len auto, one text at a time; speeds are shares of the target alone in the
same repetition. Each turn opens its decoder anew, so that nothing is known from the turn before. Needs what
scripts/demo leaves in demo/engines.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).parents[2]))

from scripts.benchmarks.draft_lengths import PROMPTS
from specrun.config import DraftKind, DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.processor import describe_processor
from specrun.request import Request
from specrun.sampling import SamplingParams

KINDS: dict[str, tuple[bool, DraftKind | None]] = {
    "none": (False, None),
    "ngram": (False, "ngram"),
    "suffix": (False, "suffix"),
    "model": (True, None),
    "hybrid": (True, "suffix"),
}
"""Whether there is a draft engine, and --draft."""
WORKLOADS = {
    "new": "greedy texts",
    "again": "the same once more",
    "similar": "the same prompts, drawn at temperature 0.3",
    "edit": "greedy texts of prompt, text and prompt again",
}


def rate(decoder: SpeculativeDecoder, requests: Sequence[Request]) -> dict[str, float]:
    """Tokens/s of the requests, one after the other, and what was drafted for them."""
    began = time.perf_counter()
    for request in requests:
        for _ in decoder.run([request]):
            pass
    seconds = time.perf_counter() - began
    tokens, stats = sum(len(request.output) for request in requests), [request.stats for request in requests]
    rounds = sum(one.rounds for one in stats)
    return {
        "tokens_per_second": tokens / seconds,
        "tokens_per_round": tokens / rounds,
        "drafted_per_round": sum(one.drafted for one in stats) / rounds,
        "acceptance_rate": sum(one.accepted for one in stats) / max(1, sum(one.evaluated for one in stats)),
    }


def run_workloads(decoder: SpeculativeDecoder, output_len: int) -> dict[str, dict[str, float]]:
    """See ``WORKLOADS``."""
    prompts = [decoder.tokenizer.encode(text).ids for text in PROMPTS]
    first = [Request(prompt, SamplingParams(), output_len) for prompt in prompts]
    found = {"new": rate(decoder, first)}
    found["again"] = rate(decoder, [Request(prompt, SamplingParams(), output_len) for prompt in prompts])
    similar = [Request(prompt, SamplingParams(0.3, seed=seed), output_len) for seed, prompt in enumerate(prompts)]
    found["similar"] = rate(decoder, similar)
    edits = [Request([*request.tokens, *request.prompt], SamplingParams(), output_len) for request in first]
    found["edit"] = rate(decoder, edits)
    return found


def share(turn: dict[str, Any], kind: str, workload: str) -> float:
    """Tokens/s of one kind of draft, as a share of the target alone."""
    return float(turn[kind][workload]["tokens_per_second"] / turn["none"][workload]["tokens_per_second"])


@click.command()
@click.option("--engines_dir", type=click.Path(path_type=Path), default=Path("demo/engines"), show_default=True)
@click.option("--output_len", type=int, default=96, show_default=True)
@click.option("--repetitions", type=int, default=3, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")
def main(engines_dir: Path, output_len: int, repetitions: int, json_file: Path | None) -> None:
    """See the module."""
    turns: list[dict[str, Any]] = []
    for _ in range(repetitions):
        turn: dict[str, Any] = {}
        for kind, (has_engine, draft) in KINDS.items():
            config = DraftTargetConfig(draft=draft, reuse_blocks=False, shared_thread_pool=True)
            draft_dir = engines_dir / "draft" if has_engine else None
            with SpeculativeDecoder.open(engines_dir / "target", draft_dir, config) as decoder:
                turn[kind] = run_workloads(decoder, output_len)
            click.echo(f"{kind}: {' '.join(f'{share(turn, kind, name):.2f}' for name in WORKLOADS)}", err=True)
        turns.append(turn)
    shares = {
        kind: {name: statistics.median(share(turn, kind, name) for turn in turns) for name in WORKLOADS}
        for kind in KINDS
    }
    found = {
        "processor": describe_processor(),
        "date": time.strftime("%Y-%m-%d"),
        "output_len": output_len,
        "workloads": WORKLOADS,
        "shares": shares,
        "turns": turns,
    }
    text = json.dumps(found, indent=1)
    click.echo(text)
    if json_file:
        json_file.write_text(text + "\n")


if __name__ == "__main__":
    main()
