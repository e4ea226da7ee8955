#!/usr/bin/env python3
"""Speed of a pair against its target alone: both interleaved in one run, medians over repetitions.

Timings are only comparable within one run. The predicted speed-up (arXiv 2211.17192) comes from the acceptance rate
and the engines' own step times measured in the same run.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import click

from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.request import Request
from specrun.sampling import SamplingParams
from specrun.stats import predicted_speedup
from specrun.tokenizer import load_tokenizer

PROMPTS = ("The try statement", "A class definition is", "The import statement", "Exceptions are")


@dataclass
class Run:
    """One batch decoded once."""

    ids: list[list[int]]
    seconds: float
    rounds: int
    accepted: int
    evaluated: int
    target_seconds: float
    target_calls: int
    draft_seconds: float
    draft_calls: int


def decode(decoder: SpeculativeDecoder, prompts: list[list[int]], params: SamplingParams, length: int) -> Run:
    """Decode ``prompts`` as one batch; stop ids are ignored, so that every run commits the same number of tokens."""
    requests = [Request(prompt, params, length) for prompt in prompts]
    began = time.perf_counter()
    for _ in decoder.run(requests):
        pass
    seconds = time.perf_counter() - began
    target, drafter = decoder.loop.round.target, decoder.loop.round.drafter
    stats = [request.stats for request in requests]
    return Run(
        ids=[request.output for request in requests],
        seconds=seconds,
        rounds=sum(s.rounds for s in stats),
        accepted=sum(s.accepted for s in stats),
        evaluated=sum(s.evaluated for s in stats),
        target_seconds=target.seconds,
        target_calls=target.calls,
        draft_seconds=drafter.runner.seconds if drafter else 0.0,
        draft_calls=drafter.runner.calls if drafter else 0,
    )


@click.command()
@click.option("--engine_dir", type=click.Path(path_type=Path), required=True)
@click.option("--draft_engine_dir", type=click.Path(path_type=Path), required=True)
@click.option("--draft_len", type=int, default=4, show_default=True)
@click.option("--batch_size", type=int, default=1, show_default=True)
@click.option("--output_len", type=int, default=96, show_default=True)
@click.option("--repetitions", type=int, default=3, show_default=True)
@click.option("--temperature", type=float, default=0.0, show_default=True)
@click.option("--acceptance", type=click.Choice(["tokens", "logits"]), default="tokens", show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the figures here.")
def main(
    engine_dir: Path,
    draft_engine_dir: Path,
    draft_len: int,
    batch_size: int,
    output_len: int,
    repetitions: int,
    temperature: float,
    acceptance: str,
    json_file: Path | None,
) -> None:
    """Measure tokens per second with and without the draft."""
    params = SamplingParams(temperature=temperature, seed=1)
    alone = SpeculativeDecoder.open(engine_dir)
    config = DraftTargetConfig(draft_len=draft_len, use_logits=acceptance == "logits")
    pair = SpeculativeDecoder.open(engine_dir, draft_engine_dir, config)
    tokenizer = load_tokenizer(engine_dir)
    prompts = [tokenizer.encode(PROMPTS[i % len(PROMPTS)]).ids for i in range(max(batch_size, len(PROMPTS)))]
    batches = [prompts[i : i + batch_size] for i in range(0, len(prompts) - batch_size + 1, batch_size)]
    for decoder in (alone, pair):
        decode(decoder, batches[0], params, 8)  # First calls allocate.
    runs: dict[str, list[Run]] = {"alone": [], "pair": []}
    same = True
    for _ in range(repetitions):
        for batch in batches:
            for name, decoder in (("alone", alone), ("pair", pair)):
                runs[name].append(decode(decoder, batch, params, output_len))
            same &= runs["alone"][-1].ids == runs["pair"][-1].ids
    figures = summarise(runs["alone"], runs["pair"], draft_len, output_len * batch_size)
    if acceptance == "tokens" or params.greedy:  # Elsewhere the distribution is the target's, the path is not.
        figures["identical_ids"] = same
    report(figures)
    if json_file:
        machine = {"processor": platform.processor() or platform.machine(), "backend": pair.target.backend.model_dump()}
        settings = {"draft_len": draft_len, "batch_size": batch_size, "output_len": output_len}
        settings |= {"temperature": temperature, "acceptance": acceptance, "repetitions": repetitions}
        result = {"machine": machine, "settings": settings, "figures": figures}
        json_file.write_text(json.dumps(result, indent=2) + "\n")


def summarise(alone: list[Run], pair: list[Run], draft_len: int, tokens: int) -> dict[str, float | bool]:
    """Medians of per-batch ratios, and the prediction from the same run's step times."""
    accepted, evaluated = sum(run.accepted for run in pair), sum(run.evaluated for run in pair)
    alpha = accepted / evaluated
    step = sum(run.target_seconds for run in alone) / sum(run.target_calls for run in alone)
    verify = sum(run.target_seconds for run in pair) / sum(run.target_calls for run in pair)
    draft = sum(run.draft_seconds for run in pair) / sum(run.draft_calls for run in pair)
    host = 1 - sum(run.target_seconds + run.draft_seconds for run in pair) / sum(run.seconds for run in pair)
    return {
        "tokens_per_second_alone": statistics.median(tokens / run.seconds for run in alone),
        "tokens_per_second": statistics.median(tokens / run.seconds for run in pair),
        "speedup": statistics.median(a.seconds / b.seconds for a, b in zip(alone, pair, strict=True)),
        "predicted_speedup": predicted_speedup(alpha, draft_len, draft / step, verify / step),
        "acceptance_rate": alpha,
        "tokens_per_round": 1 + accepted / sum(run.rounds for run in pair),
        "target_step_ms": step * 1e3,
        "verify_ms": verify * 1e3,
        "draft_step_ms": draft * 1e3,
        "round_overhead": host,
    }


def report(figures: dict[str, float | bool]) -> None:
    """The figures for people."""
    f = figures
    click.echo(f"target alone          {f['tokens_per_second_alone']:8.1f} tokens/s")
    click.echo(f"with the draft        {f['tokens_per_second']:8.1f} tokens/s")
    predicted = f"predicted from acceptance and step times: {f['predicted_speedup']:.2f}"
    click.echo(f"speed-up              {f['speedup']:8.2f} x  ({predicted})")
    click.echo(f"acceptance rate       {f['acceptance_rate']:8.0%}    ({f['tokens_per_round']:.2f} tokens a round)")
    click.echo(
        f"a target step / a verify pass / a draft step: {f['target_step_ms']:.1f} / {f['verify_ms']:.1f} / "
        f"{f['draft_step_ms']:.2f} ms; time outside the engines {f['round_overhead']:.1%}"
    )
    if "identical_ids" in f:
        click.echo(f"the same ids with and without the draft: {'yes' if f['identical_ids'] else 'NO'}")


if __name__ == "__main__":
    main()
