"""``auto`` without one of its parts: what each part of the rule for draft lengths is worth.

Simulated (the default): machines and acceptance rates are made up, as in tests/speculative/test_draft_length.py, so a
minute covers what would take hours. Times are in those of the best fixed length. ``--engines``: pairs of
draft_lengths.py, whose texts every form of the rule decodes in turns; times are in those of the whole rule.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import numpy as np

from scripts.benchmarks.draft_lengths import MOST, TEXTS_PER_ROW, Text, begin, make_engine, output_lens, seconds_of
from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.speculative import draft_length, round_times

RESULTS = Path(__file__).with_name("results") / "draft_length_parts.json"
WHOLE = "whole rule"


def _no_line(self: Any) -> tuple[float, float]:
    """The scale alone, in place of a scale and a slope."""
    if not any(self.counts):
        return 1.0, 0.0
    scales = np.array(self._means) / np.array(self.expected.rounds)
    return float(np.average(scales, weights=self.counts)), 0.0


PARTS: dict[str, Callable[[ModuleType, ModuleType], None]] = {
    WHOLE: lambda lengths, times: None,
    "optimism": lambda lengths, times: setattr(times, "_OPTIMISM", 0.0),
    "line through all lengths": lambda lengths, times: setattr(times.RoundTimes, "_line", _no_line),
    "its slope": lambda lengths, times: setattr(times, "_SLOPE_ROUNDS", 1e9),
    "limit of outliers": lambda lengths, times: setattr(times, "_OUTLIER", 1e9),
    "trials": lambda lengths, times: setattr(lengths, "_TRIAL_SHARE", 0.0),
    "plain rounds": lambda lengths, times: setattr(lengths.DraftLength, "_measures_plain", lambda *_: False),
    "doubt": lambda lengths, times: setattr(lengths.DraftLength, "_hoped", lambda _, alphas: list(alphas)),
    "rates of requests": lambda lengths, times: setattr(lengths, "_REQUEST_TOKENS", 1e9),
    "uncached drafts": lambda lengths, times: setattr(lengths, "_UNCACHED_SHARE", 0.0),
    "second plain round": lambda lengths, times: setattr(lengths, "_SETTLED", 1),
    "measured yield": lambda lengths, times: setattr(lengths._Yield, "rate", lambda _, expected: expected),
}
"""What takes each part away from fresh copies of the two modules."""


def without(part: str) -> type[draft_length.DraftLength]:
    """The rule without a part."""
    copies = []
    for module in (round_times, draft_length):
        spec = importlib.util.find_spec(module.__name__)
        assert spec is not None and spec.loader is not None
        copy = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(copy)
        copies.append(copy)
    times, lengths = copies
    lengths.RoundTimes, lengths.ExpectedTimes = times.RoundTimes, times.ExpectedTimes  # type: ignore[attr-defined]
    PARTS[part](lengths, times)
    made: type[draft_length.DraftLength] = lengths.DraftLength
    return made


def _with_spikes(chooser: Any, seed: int) -> Any:
    """Every fiftieth round is seen to take ten times as long."""
    dice, observe = np.random.default_rng(seed), chooser.observe

    def told(requests: Any, result: Any, *more: Any) -> None:
        is_spike = result.seconds is not None and dice.random() < 0.02
        observe(requests, result._replace(seconds=result.seconds * 10) if is_spike else result, *more)

    chooser.observe = told
    return chooser


def simulated(make: Callable[..., Any], tests: ModuleType) -> dict[str, tuple[float, float]]:
    """Mean and worst time in that of the best fixed length, by kind of machine. tests: the module of simulators."""
    shares: dict[str, list[float]] = {}
    run: tuple[Any, ...]
    seconds, fixed = tests.seconds_a_token, tests.seconds_of_fixed
    lines = [(alpha, *cost) for alpha in (0.5, 0.7, 0.9, 0.98) for cost in ((0.03, 0.05), (0.1, 0.01), (0.2, 0.02))]

    def add(kind: str, best: float, times: Iterator[float] | list[float]) -> None:
        shares.setdefault(kind, []).append(float(np.mean(list(times)) / best))

    for alpha, cost, width in lines:
        for rows in (1, 4):
            best = min(fixed(g, alpha, lambda _, g, a=cost + width: 1 + g * a, rows) for g in range(MOST + 1))
            run = (lambda _, alpha=alpha: alpha, cost, width, rows)
            add("quiet", best, [seconds(make(MOST, None), *run, seed=seed) for seed in range(2)])
            if alpha in (0.5, 0.9):
                times = [seconds(_with_spikes(make(MOST, None), s), *run, seed=s) for s in range(3)]
                add("spikes", best, times)
                noisy: dict[str, Any] = {"drift": 0.1, "noise": 0.25}
                add("noisy", best, [seconds(make(MOST, None), *run, seed=seed, **noisy) for seed in range(3)])
    for rows in (1, 4, 8):
        for alpha, step in ((0.6, 12), (0.76, 12), (0.9, 12), (0.76, 6)):
            more: dict[str, Any] = {"rows": rows, "tokens": 1500, "texts": 8}
            more["time_of"] = lambda b, g, step=step: 0.4 + 0.05 * step * -(-b * (g + 1) // step) + 0.01 * g
            best = min(np.mean([fixed(g, alpha, seed=s, **more) for s in range(6)]) for g in range(MOST + 1))
            run = (lambda _, alpha=alpha: alpha, 0.01, 0.02)
            add("steps", float(best), [seconds(make(MOST, None), *run, seed=s, **more) for s in range(3)])
    for alpha, cost, width in ((0.0, 0.03, 0.05), (0.02, 0.5, 0.1), (0.8, 1.0, 0.06), (0.3, 1.0, 1.0)):
        for rows in (1, 4):
            add("cannot pay", 1.0, [seconds(make(MOST, None), lambda _, alpha=alpha: alpha, cost, width, rows)])
    for kind, rate in (("begins to pay", _late), ("changing texts", _changing)):
        for rows in (1, 4):
            run, more = (rate, 0.05, 0.03, rows), {"texts": 8}
            best = min(seconds(make(MOST, g), *run, seed=1, **more) for g in range(MOST + 1))
            add(kind, best, [seconds(make(MOST, None), *run, seed=seed, **more) for seed in range(3)])
    return {kind: (float(np.mean(times)), max(times)) for kind, times in shares.items()}


def _late(tokens: int) -> float:
    return 0.0 if tokens < 1000 else 0.9


def _changing(tokens: int) -> float:
    return 0.9 if tokens // 375 % 2 else 0.2


def on_engines(work: Path, form: str, draft: str, batch: int, num_texts: int, parts: Sequence[str]) -> dict[str, float]:
    """Time of the rule without each of ``parts`` in that of the whole rule: medians over groups of texts, in turns."""
    parts = [WHOLE, *(part for part in parts if part != WHOLE)]
    target = make_engine(work, "target", form)
    draft_engine = target if draft == "target" else make_engine(work, draft, "float32")
    prompts = [json.loads(line)["text"] for line in (work / "prompts.jsonl").read_text().splitlines()[:num_texts]]
    seconds: dict[str, list[float]] = {part: [] for part in parts}
    with ExitStack() as stack:
        config = DraftTargetConfig(reuse_blocks=False)
        decoder = stack.enter_context(SpeculativeDecoder.open(target, draft_engine, config))
        decoder.scheduler.max_rows = batch
        whole = decoder.scheduler.lengths
        given = (whole.max_draft_len, None, whole._expected, whole._skips_unused_tokens, whole._looks_up)
        rules = {part: without(part)(*given) for part in parts}
        encode = decoder.tokenizer.encode
        lengths = output_lens(len(prompts))
        texts = [Text(encode(prompt).ids, length) for prompt, length in zip(prompts, lengths, strict=True)]
        for turn, first in enumerate(range(0, len(texts), TEXTS_PER_ROW * batch)):
            group, later = texts[first : first + TEXTS_PER_ROW * batch], turn % len(parts)
            for part in parts[later:] + parts[:later]:
                decoder.scheduler.lengths = rules[part]
                begin(decoder, group[:batch])
                seconds[part].append(seconds_of(decoder, group, None))
    return {
        part: statistics.median(own / other for own, other in zip(times, seconds[WHOLE], strict=True))
        for part, times in seconds.items()
    }


@click.command()
@click.option("--part", "parts", type=click.Choice([*PARTS]), multiple=True, default=[*PARTS])
@click.option("--engines", type=click.Path(path_type=Path), help="A folder of draft_lengths.py; default: simulated.")
@click.option("--draft", type=click.Choice(["draft", "random", "target"]), default="draft", show_default=True)
@click.option("--form", "forms", multiple=True, default=("int8", "int4"), show_default=True)
@click.option("--batch_size", "batches", type=int, multiple=True, default=(1, 4), show_default=True)
@click.option("--texts", type=int, default=32, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), default=RESULTS, show_default=True)
def main(
    parts: tuple[str, ...],
    engines: Path | None,
    draft: str,
    forms: tuple[str, ...],
    batches: tuple[int, ...],
    texts: int,
    json_file: Path,
) -> None:
    """Measure the rule without each of its parts."""
    results: dict[str, Any] = json.loads(json_file.read_text()) if json_file.is_file() else {}
    if engines is None:
        from tests.speculative import test_draft_length

        for part in parts:
            found = simulated(without(part), test_draft_length)
            results.setdefault("simulated", {})[part] = found
            click.echo(
                f"{part}: " + "  ".join(f"{kind} {mean:.3f} ({most:.3f})" for kind, (mean, most) in found.items())
            )
    else:
        for form in forms:
            for batch in batches:
                shares = on_engines(engines, form, draft, batch, texts, parts)
                what = f"{engines.name} {form}, {draft}, batch {batch}"
                results.setdefault("engines", {})[what] = shares
                click.echo(f"{what}: " + "  ".join(f"{part} {x:.3f}" for part, x in shares.items()))
    json_file.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
