"""Speed of a pair against its target alone, measured side by side.

Machines are noisy: the target alone and the pair take turns, batch by batch, ratios are formed within a repetition, and
the median of the repetitions is shown with the lowest and the highest.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from statistics import mean
from typing import Literal

import numpy as np
import numpy.typing as npt

from specrun.builder import BuildOptions, engines_of
from specrun.config import DraftKind, DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.devices.processor import processor_name
from specrun.engine_dir.config import EngineConfig
from specrun.errors import RequestError
from specrun.evaluation.bench_results import Result, Split, Spread, shown_draft_len, vllm_names
from specrun.evaluation.prompt_sets import CategorizedPrompt
from specrun.request.request import Request
from specrun.request.stats import Stats, predicted_speedup, speculative_decoding
from specrun.sampling.sampler import SamplingParams

_WARM_UP_ROUNDS = 8
"""Enough for a GPU to record a batch's rounds, and for ``auto`` to have tried the draft."""


@dataclass(frozen=True)
class BenchSettings:
    """What to measure: every batch size with every draft length."""

    batch_sizes: Sequence[int] = (1,)
    draft_lens: Sequence[int | Literal["auto"] | None] = (4,)
    """``auto`` and None are the same, and become None."""
    output_len: int = 96
    """Tokens of every output; stop ids are ignored, so that every run commits as many."""
    repetitions: int = 3
    params: SamplingParams = field(default_factory=SamplingParams)
    use_logits: bool = False
    shared_thread_pool: bool = False
    bit_exact: bool | None = None
    draft: DraftKind | None = None
    """See ``DraftTargetConfig`` for the last three."""

    def __post_init__(self) -> None:
        """Draw the seed that is not given. Raise RequestError for settings that measure nothing."""
        object.__setattr__(self, "params", self.params.seeded())  # All runs draw the same texts.
        object.__setattr__(self, "draft_lens", self.fixed_draft_lens)
        for name, values in (("batch sizes", self.batch_sizes), ("draft lengths", self.draft_lens)):
            if not values or len(set(values)) < len(values):
                raise RequestError(f"{name} {list(values)}: expected one or more, each of them once")
        least = {"batch size": min(self.batch_sizes), "output_len": self.output_len, "repetitions": self.repetitions}
        for name, value in least.items():
            if value < 1:
                raise RequestError(f"{name} {value}: expected 1 or more")

    @property
    def fixed_draft_lens(self) -> list[int | None]:
        """``draft_lens``, with None for ``auto``."""
        return [None if length == "auto" else length for length in self.draft_lens]


@dataclass
class _Pass:
    """All prompts decoded once by one decoder, batch by batch."""

    seconds: float = 0.0
    first_tokens: list[float] = field(default_factory=list)
    """Seconds, for each request."""
    later: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(5))
    """What ``_clock`` counts, in all rounds after those in which prompts were still read."""
    rounds: list[tuple[int, int, int]] = field(default_factory=list)
    """Draft tokens of a request's round: drafted, evaluated, accepted."""
    ids: list[list[int]] = field(default_factory=list)
    stats: dict[str, list[Stats]] = field(default_factory=dict)
    """Of the requests, by category."""

    def decode(self, decoder: SpeculativeDecoder, requests: Mapping[Request, str]) -> None:
        """Add a batch: requests and their categories."""
        known = dict.fromkeys(requests, (0, 0, 0))
        clocks: list[npt.NDArray[np.float64]] = []
        began = time.perf_counter()
        for event in decoder.run([*requests]):
            if event.request.error:
                raise event.request.error
            if not clocks and all(request.token_outputs for request in requests):
                clocks.append(_clock(decoder, began))
            stats, (drafted, evaluated, accepted) = event.request.stats, known[event.request]
            known[event.request] = now = (stats.drafted, stats.evaluated, stats.accepted)
            self.rounds.append((now[0] - drafted, now[1] - evaluated, now[2] - accepted))
        clocks.append(_clock(decoder, began))
        self.seconds += clocks[-1][0]
        self.first_tokens += [request.stats.first_token_seconds for request in requests]
        self.later += clocks[-1] - clocks[0]
        self.ids += [request.output for request in requests]
        for request, category in requests.items():
            self.stats.setdefault(category, []).append(request.stats)

    @property
    def tokens_per_second(self) -> float:
        """Output tokens over wall time."""
        return sum(map(len, self.ids)) / self.seconds


def _clock(decoder: SpeculativeDecoder, began: float) -> npt.NDArray[np.float64]:
    """Since a batch's start: seconds, those in the target and its calls, those in the draft and its (0: not known)."""
    elapsed, times = time.perf_counter() - began, decoder.scheduler.round.engine_times()
    return np.array([elapsed, *(times or [0] * 4)])


def bench(
    target: str | Path,
    draft: str | Path | None,
    prompts: Sequence[str | Sequence[int] | CategorizedPrompt],
    settings: BenchSettings | None = None,
    report: Callable[[str], None] = lambda _: None,
    tokenizer_dir: str | Path | None = None,
    build: BuildOptions | None = None,
) -> list[Result]:
    """Measure a target with its draft beside the target alone; a result for every batch size and draft length.

    target, draft, build: as ``SpeculativeDecoder.open`` takes them. draft: may be None where ``settings`` name what
    drafts without a model. prompts: texts, token ids, or texts with categories, by which acceptance is told apart.
    Every repetition decodes them all, and some again where the last batch is not full. report: gets a line for every
    repetition. Two targets and one draft are loaded at a time.
    Raises what ``SpeculativeDecoder.open`` raises, and RequestError for prompts and batches that do not fit.
    """
    if not prompts:
        raise RequestError("no prompts: expected one or more")
    settings = settings or BenchSettings()
    target_dir, draft_dir = engines_of(target, draft, build)
    results: dict[tuple[int, int | None], Result] = {}

    def on_warm_up(done: int, of: int) -> None:
        if done == 0:
            report(f"warm-up: {of} steps")

    plain = DraftTargetConfig(
        reuse_blocks=False, shared_thread_pool=settings.shared_thread_pool, bit_exact=settings.bit_exact
    )
    with SpeculativeDecoder.open(target_dir, None, plain, tokenizer_dir, on_warm_up) as alone:
        texts: list[tuple[Sequence[int], str]] = []
        for number, each in enumerate(prompts, 1):
            asked, category = each if isinstance(each, CategorizedPrompt) else (each, "")
            # Only for its checks: a benchmark's own requests have no stop ids.
            prompt = alone.request(asked, max_output_len=1, name=f"prompt {number}").prompt
            texts.append((prompt, category))
            if (room := alone.target.build_config.max_seq_len - len(prompt)) < settings.output_len:
                raise RequestError(
                    f"prompt {number}: {len(prompt)} tokens + {settings.output_len} of output, the engine's "
                    f"max_seq_len is {len(prompt) + room}; give --output_len {room} or less, or build with a larger "
                    "--max_seq_len"
                )
        # Longest first: one that the target was not built for is an error before anything is measured.
        for draft_len in sorted(settings.fixed_draft_lens, key=lambda length: length or 0, reverse=True):
            config = replace(plain, draft_len=draft_len, use_logits=settings.use_logits, draft=settings.draft)
            with SpeculativeDecoder.open(target_dir, draft_dir, config, on_warm_up=on_warm_up) as pair:
                if (most := max(settings.batch_sizes)) > pair.max_batch_size:
                    raise RequestError(f"batch size {most}: the engines were built for at most {pair.max_batch_size}")
                for size in settings.batch_sizes:
                    for note in () if results else pair.notes:
                        report(f"note: {note}")
                    report(f"batch {size}, draft_len {shown_draft_len(draft_len)}")
                    passes = _interleave(alone, pair, _batches(texts, size, settings), settings.repetitions, report)
                    results[size, draft_len] = _summarize(size, draft_len, passes, settings)
    return [results[size, draft_len] for size in settings.batch_sizes for draft_len in settings.fixed_draft_lens]


_Batch = dict[Request, str]
"""Requests, and the categories of their prompts."""


def _batches(
    prompts: Sequence[tuple[Sequence[int], str]], size: int, settings: BenchSettings
) -> Callable[[], list[_Batch]]:
    """A function that makes the requests anew. A prompt that comes again gets another seed, hence another text."""

    def request(row: int) -> tuple[Request, str]:
        prompt, category = prompts[row % len(prompts)]
        return Request(prompt, settings.params.seeded(row // len(prompts)), settings.output_len), category

    return lambda: [dict(request(first + row) for row in range(size)) for first in range(0, len(prompts), size)]


def _interleave(
    alone: SpeculativeDecoder,
    pair: SpeculativeDecoder,
    batches: Callable[[], list[_Batch]],
    repetitions: int,
    report: Callable[[str], None],
) -> list[tuple[_Pass, _Pass]]:
    """Warm up, then let the two take turns: a pass of each for every repetition."""
    for decoder in (alone, pair):
        for requests in batches():
            for _ in islice(decoder.run([*requests]), _WARM_UP_ROUNDS * len(requests)):
                pass
    passes = []
    for repetition in range(1, repetitions + 1):
        ours, theirs = _Pass(), _Pass()
        for plain, drafted in zip(batches(), batches(), strict=True):
            ours.decode(alone, plain)
            theirs.decode(pair, drafted)
        passes.append((ours, theirs))
        rates = f"{ours.tokens_per_second:.1f} tokens/s alone, {theirs.tokens_per_second:.1f} with the draft"
        report(f"  repetition {repetition}/{repetitions}: {rates}")
    return passes


def _summarize(
    size: int, draft_len: int | None, passes: Sequence[tuple[_Pass, _Pass]], settings: BenchSettings
) -> Result:
    alone, pair = zip(*passes, strict=True)
    drafted, evaluated, accepted = np.array([counts for theirs in pair for counts in theirs.rounds]).T
    places = range(1, evaluated.max() + 1)
    timed = all(ours.later[2] and theirs.later[2] for ours, theirs in passes)
    alpha = float(accepted.sum() / evaluated.sum()) if evaluated.any() else None
    lengths = drafted if draft_len is None else np.array([draft_len])
    lossless = settings.params.greedy or not settings.use_logits
    by_category: dict[str, list[Stats]] = {}
    for theirs in pair:
        for category, stats in theirs.stats.items():
            by_category.setdefault(category, []).extend(stats)
    every = [one for stats in by_category.values() for one in stats]
    later = [(one.seconds - one.first_token_seconds) / max(1, settings.output_len - 1) for one in every]
    return Result(
        batch_size=size,
        draft_len=draft_len,
        tokens_per_second_alone=Spread.of(ours.tokens_per_second for ours in alone),
        tokens_per_second=Spread.of(theirs.tokens_per_second for theirs in pair),
        speedup=Spread.of(ours.seconds / theirs.seconds for ours, theirs in passes),
        first_token_ms_alone=Spread.of(mean(ours.first_tokens) * 1e3 for ours in alone),
        first_token_ms=Spread.of(mean(theirs.first_tokens) * 1e3 for theirs in pair),
        drafted_per_round=float(drafted.mean()),
        acceptance_rate=alpha,
        acceptance_by_position=[float((accepted >= n).sum() / (evaluated >= n).sum()) for n in places],
        tokens_per_round=1 + float(accepted.mean()),
        identical_ids=all(ours.ids == theirs.ids for ours, theirs in passes) if lossless else None,
        split=_split(passes, alpha or 0.0, lengths.tolist()) if timed else None,
        token_ms=mean(later) * 1e3,
        speculative_decoding=speculative_decoding(every),
        by_category={name: speculative_decoding(stats) for name, stats in by_category.items() if name},
    )


def _split(passes: Sequence[tuple[_Pass, _Pass]], alpha: float, lengths: Sequence[int]) -> Split:
    """``lengths``: of the rounds whose speed-up is predicted."""
    figures = []
    for ours, theirs in passes:
        _, target, steps, _, _ = ours.later
        elapsed, verifying, rounds, drafting, draft_steps = theirs.later
        step, host = target / steps, elapsed - verifying - drafting
        draft_cost, verify_cost = drafting / max(1, draft_steps) / step, verifying / rounds / step
        # Over rounds of several lengths: all their tokens over all their time, in target steps.
        shares = [g * draft_cost + verify_cost for g in lengths]
        ratios = [predicted_speedup(alpha, g, draft_cost, verify_cost) for g in lengths]
        predicted = np.average(ratios, weights=shares)
        milliseconds = [1e3 * seconds / rounds for seconds in (drafting, verifying, host)]
        figures.append((*milliseconds, host / elapsed, 1e3 * step, predicted))
    return Split(*map(Spread.of, zip(*figures, strict=True)))


def as_json(results: Sequence[Result], target_config: EngineConfig, settings: BenchSettings) -> str:
    """The results, how they were measured and on what machine."""
    machine = {
        "processor": processor_name(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "backend": target_config.backend.model_dump(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    found = {
        "machine": machine,
        "settings": asdict(settings),
        "results": [asdict(result) | {"vllm": vllm_names(result)} for result in results],
    }
    return json.dumps(found, indent=2)
