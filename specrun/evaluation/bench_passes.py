"""Passes over all prompts, timed; and what the passes of several repetitions come to."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean, median

import numpy as np
import numpy.typing as npt

from specrun.decoder import SpeculativeDecoder
from specrun.evaluation.arrivals import decode_arriving
from specrun.evaluation.bench_results import Example, Result, Split, Spread
from specrun.evaluation.bench_settings import BenchSettings
from specrun.request.request import Request
from specrun.request.stats import Stats, predicted_speedup, speculative_decoding


@dataclass
class Pass:
    """All prompts decoded once by one decoder, batch by batch."""

    seconds: float = 0.0
    first_tokens: list[float] = field(default_factory=list)
    """Seconds, for each request."""
    requests: list[float] = field(default_factory=list)
    """Seconds from each request's arrival to its last token."""
    later_tokens: list[float] = field(default_factory=list)
    """Seconds of a token behind the first one, for each request that has any."""
    later: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(5))
    """Counts of ``_clock`` in all rounds after those in which prompts were still read."""
    rounds: list[tuple[int, int, int]] = field(default_factory=list)
    """Draft tokens of a request's round: drafted, evaluated, accepted."""
    ids: list[list[int]] = field(default_factory=list)
    stats: dict[str, list[Stats]] = field(default_factory=dict)
    """Statistics of the requests, by category."""
    token_seconds: dict[str, list[float]] = field(default_factory=dict)
    """Seconds of a token of each request, the prompt's included, by category."""
    first: Request | None = None
    """The first request."""

    def decode(
        self, decoder: SpeculativeDecoder, requests: Mapping[Request, str], arrivals: Sequence[float] | None = None
    ) -> None:
        """Add a batch: requests and their categories.

        arrivals: when each of them comes. Then rounds are not divided into their parts.
        """
        self.first = self.first or next(iter(requests))
        known = dict.fromkeys(requests, (0, 0, 0))
        clocks: list[npt.NDArray[np.float64]] = []
        began = time.perf_counter()
        events = decoder.run([*requests]) if arrivals is None else decode_arriving(decoder, [*requests], arrivals)
        for event in events:
            if event.request.error:
                raise event.request.error
            if not clocks and arrivals is None and all(request.token_outputs for request in requests):
                clocks.append(_clock(decoder, began))
            stats, (drafted, evaluated, accepted) = event.request.stats, known[event.request]
            known[event.request] = now = (stats.drafted, stats.evaluated, stats.accepted)
            self.rounds.append((now[0] - drafted, now[1] - evaluated, now[2] - accepted))
        clocks.append(_clock(decoder, began))
        self.seconds += clocks[-1][0]
        self.later += clocks[-1] - clocks[0]
        for request, category in requests.items():
            stats = request.stats
            self.first_tokens.append(stats.first_token_seconds)
            self.requests.append(stats.seconds)
            if behind := len(request.token_outputs) - 1:
                self.later_tokens.append((stats.seconds - stats.first_token_seconds) / behind)
            self.stats.setdefault(category, []).append(stats)
            self.token_seconds.setdefault(category, []).append(stats.seconds / len(request.token_outputs))
            self.ids.append(request.output)

    @property
    def tokens_per_second(self) -> float:
        """Output tokens over wall time."""
        return sum(map(len, self.ids)) / self.seconds


def _clock(decoder: SpeculativeDecoder, began: float) -> npt.NDArray[np.float64]:
    """Since a batch's start: seconds, those in the target and its calls, those in the draft and its (0: not known)."""
    elapsed, times = time.perf_counter() - began, decoder.scheduler.round.engine_times()
    return np.array([elapsed, *(times or [0] * 4)])


def summarize(
    size: int,
    draft_len: int | None,
    passes: Sequence[tuple[Pass, Pass]],
    settings: BenchSettings,
    bytes_read: int | None = None,
) -> Result:
    """The result of one batch size and draft length. passes: of the target alone and the pair, by repetition.

    bytes_read: of weights, by a step of the target; None: not known.
    """
    alone, pair = zip(*passes, strict=True)

    def speedup(ours: Pass, theirs: Pass) -> float:
        if settings.request_rate is None:
            return theirs.tokens_per_second / ours.tokens_per_second
        return mean(ours.requests) / mean(theirs.requests)  # How many tokens a second there are follows the rate.

    drafted, evaluated, accepted = np.array([counts for theirs in pair for counts in theirs.rounds]).T
    places = range(1, evaluated.max() + 1)
    timed = all(ours.later[2] and theirs.later[2] for ours, theirs in passes)
    alpha = float(accepted.sum() / evaluated.sum()) if evaluated.any() else None
    may_be_shorter = settings.config.draft is not None or bool(settings.config.draft_confidence)
    lengths = drafted if draft_len is None or may_be_shorter else np.array([draft_len])
    lossless = settings.params.greedy or not settings.config.use_logits
    by_category: dict[str, list[Stats]] = {}
    for theirs in pair:
        for category, stats in theirs.stats.items():
            by_category.setdefault(category, []).extend(stats)
    split = split_of(passes, alpha or 0.0, lengths.tolist()) if timed else None
    later = [seconds for theirs in pair for seconds in theirs.later_tokens]
    return Result(
        batch_size=size,
        draft_len=draft_len,
        ignore_eos=settings.ignore_eos,
        again=settings.again,
        output_tokens=mean(len(ids) for theirs in pair for ids in theirs.ids),
        tokens_per_second_alone=Spread.of(ours.tokens_per_second for ours in alone),
        tokens_per_second=Spread.of(theirs.tokens_per_second for theirs in pair),
        speedup=Spread.of(speedup(*both) for both in passes),
        request_rate=settings.request_rate,
        request_ms_alone=Spread.of(mean(ours.requests) * 1e3 for ours in alone),
        request_ms=Spread.of(mean(theirs.requests) * 1e3 for theirs in pair),
        first_token_ms_p99=float(np.quantile([first for theirs in pair for first in theirs.first_tokens], 0.99)) * 1e3,
        first_token_ms_alone=Spread.of(mean(ours.first_tokens) * 1e3 for ours in alone),
        first_token_ms=Spread.of(mean(theirs.first_tokens) * 1e3 for theirs in pair),
        drafted_per_round=float(drafted.mean()),
        acceptance_rate=alpha,
        acceptance_by_position=[float((accepted >= n).sum() / (evaluated >= n).sum()) for n in places],
        tokens_per_round=1 + float(accepted.mean()),
        identical_ids=all(ours.ids == theirs.ids for ours, theirs in passes) if lossless else None,
        split=split,
        gigabytes_per_second_alone=bytes_read / split.target_step_ms.median / 1e6 if bytes_read and split else None,
        gigabytes_per_second=bytes_read / split.verify_ms.median / 1e6 if bytes_read and split else None,
        synthetic_acceptance=settings.synthetic_acceptance,
        token_ms=mean(later) * 1e3 if later else 0.0,
        speculative_decoding=speculative_decoding(
            request_stats for stats in by_category.values() for request_stats in stats
        ),
        by_category={
            name: {**speculative_decoding(stats), "speedup": category_speedup(passes, name)}
            for name, stats in by_category.items()
            if name
        },
    )


def category_speedup(passes: Sequence[tuple[Pass, Pass]], category: str) -> float:
    """Speedup in the time of a token of such requests: the median of the repetitions."""
    return median(mean(ours.token_seconds[category]) / mean(theirs.token_seconds[category]) for ours, theirs in passes)


def split_of(passes: Sequence[tuple[Pass, Pass]], alpha: float, lengths: Sequence[int]) -> Split:
    """Where the time goes. lengths: of the rounds whose speed-up is predicted."""
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
        steps_ms = (1e3 * step, 1e3 * drafting / max(1, draft_steps))
        figures.append((*milliseconds, host / elapsed, *steps_ms, predicted))
    return Split(*map(Spread.of, zip(*figures, strict=True)))


def example(decoder: SpeculativeDecoder, request: Request) -> Example | None:
    """The text of a finished request; None without a tokenizer."""
    stream = decoder.request(request.prompt, max_output_len=1).stream
    if stream is None:
        return None
    pieces: list[tuple[str, bool]] = []
    for token in request.token_outputs:
        text = stream.push(token.token)
        if pieces and pieces[-1][1] == token.from_draft:
            text = pieces.pop()[0] + text
        pieces.append((text, token.from_draft))
    text, from_draft = pieces[-1]
    pieces[-1] = (text + stream.finish(), from_draft)
    return Example(decoder.tokenizer.decode(request.prompt), pieces)
