"""How many tokens to draft: finds, while decoding, the draft length that yields the most tokens a second.

A round of draft length g takes T(g) seconds and yields 1 + alpha + .. + alpha^g tokens, where alpha is the acceptance
rate (arXiv 2211.17192). Both are measured. A non-speculative step is a round with g = 0. How the length is chosen:

1. T(g) is estimated for every g, from what is expected before any round ran and from what was measured since
   (``round_times``). Where no engine's passes were timed, the first two rounds have g = 0 and 1.
2. alpha of a request is estimated from its own draft tokens and from those of all requests.
3. If the best g promises less than ``min_gain``, the round is plain. Now and then a trial round drafts nevertheless,
   because only drafting shows whether it has begun to pay. Trials cost at most ``trial_time_share`` of the time.
4. Otherwise the best g by optimistic times is chosen. So a length that was rarely tried, but may be the best, is tried.
   If drafting promises little, plain rounds follow now and then, so that T(0) stays known. One that is alone takes
   longer than those that follow one another would; ``PostDraftSlowdown`` says by how much.
5. Where drafts can end by themselves, they may have as many tokens as the rows can use. The plan's
   ``min_expected_survivors`` says where another one no longer pays.
6. Where unused tokens of a pass cost nothing, each row of a batch has a draft length of its own (``draft_budget``).
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary

from specrun.drafters.acceptance_rate import AcceptanceRate
from specrun.drafters.draft_plan import DraftPlan
from specrun.scheduler.draft_budget import Speed, batch_tokens, min_expected_survivors, min_survival, share, time_of
from specrun.scheduler.round_times import ExpectedTimes, PostDraftSlowdown, RoundTimes, TimeTuning


@dataclass(frozen=True)
class Tuning:
    """The algorithm's parameters."""

    min_gain: float = 1.02
    """The factor by which drafting must promise more tokens a second than non-speculative steps."""
    clear_gain: float = 1.25
    """Factor of tokens a second below which T(0) is measured again from time to time."""
    non_speculative_every: int = 16
    """T(0) is measured again every so many rounds, by a single one."""
    run_every: int = 8
    """The first time, and each time so many measurements later, it is measured by a run of plain rounds instead."""
    trial_time_share: float = 0.01
    """The largest share of the time that trials may cost."""
    loss_window_seconds: float = 300.0
    """Seconds of decoding after which a trial's cost has lost most of its weight."""
    own_rate_tokens: float = 12.0
    """A request's own rate counts as much as that of all requests once it has so many evaluated draft tokens."""
    rate_window_tokens: float = 128.0
    """Evaluated draft tokens after which older ones have lost most of their weight."""
    uncached_token_share: float = 0.25
    """Time to read one uncached draft token, as a share of a draft step's. It is used until it was measured."""
    draft_token_share: float = 0.3
    """Time that a draft token adds to a round, as a share of T(0), where nothing better is known before any round."""
    plan_rounds: int = 8
    """The most rounds for which a plan may stand."""
    plan_share: float = 1 / 64
    """Further rounds for which a plan may stand, as a share of the measured rounds."""
    times: TimeTuning = field(default_factory=TimeTuning)


_UNKNOWN = AcceptanceRate()


_PLAIN = DraftPlan(0)
_ENDING_GAIN = 1.1
"""Drafts that end row by row are expected to be so much faster than the best common length, until that was measured."""


class _Batch(NamedTuple):
    """The rows of a round, and what is expected of it."""

    alphas: Sequence[float]
    """Acceptance rates of the rows."""
    limits: Sequence[int]
    """The most draft tokens that the rows can use."""
    longest: int
    """The most draft tokens of the round."""
    times: Sequence[float]
    """Seconds of rounds with 0, 1, .. draft tokens, up to ``longest`` or more."""

    def rates(self, doubt: float = 0.0) -> list[float]:
        """Tokens a second of rounds with 0, 1, .. ``longest`` draft tokens. doubt: is added to acceptance rates."""
        tokens = batch_tokens([min(1.0, alpha + doubt) for alpha in self.alphas], self.limits, self.longest)
        return [yielded / time for yielded, time in zip(tokens, self.times, strict=False)]


class DraftLength:
    """Chooses the draft length of every round. Owns the measured round times and acceptance rates of its decoder."""

    def __init__(
        self,
        max_draft_len: int,
        fixed_draft_len: int | None,
        prior: Callable[[int], ExpectedTimes] | None = None,
        tuning: Tuning | None = None,
        by_row: bool = False,
    ) -> None:
        """fixed_draft_len: the draft length of every round; None: the best one, 0 to ``max_draft_len``.

        prior: the expected times T(0) to T(max_draft_len) of rounds of so many rows. by_row: whether rows may have
        different draft lengths at no cost.
        """
        self.max_draft_len = max_draft_len
        self.fixed_draft_len = fixed_draft_len
        self.tuning = tuning or Tuning()
        self.drafting = bool(max_draft_len) and fixed_draft_len != 0
        """Whether drafting pays, as far as is known. If it does, the draft reads prompts when the target does."""
        self._built_prior = prior
        self._by_row = by_row
        self._speeds: dict[int, Speed] = {}
        """Speeds of rounds in which each row's draft ended by itself, by batch size."""
        self._ending_gain = Speed()
        """The tokens of these rounds, of all batch sizes, for each token that the best common length promised."""
        self._common = 0.0
        """Tokens a second that it promises in this round, where each row's draft ends by itself."""
        self._guess = [1 + self.tuning.draft_token_share * draft_len for draft_len in range(max_draft_len + 1)]
        self._times: dict[int, RoundTimes] = {}
        """Round times in seconds, by batch size."""
        self._overall = AcceptanceRate()
        self._rounds = 0
        """Number of measured rounds."""
        self._evaluated = 0
        """Draft tokens so far of which it is known whether they were accepted."""
        self._own: WeakKeyDictionary[object, AcceptanceRate] = WeakKeyDictionary()
        self._trials = Trials(self.tuning)
        self._since_plain = 0
        """Rounds since the last plain one."""
        self._slowdown = PostDraftSlowdown()
        self._measurements = 0
        """Number of times that T(0) was measured though drafting paid."""
        self._plain_left = 0
        """Plain rounds of the present run that are still to come."""
        self._uncached_token_times: deque[float] = deque(maxlen=self.tuning.times.times_per_length)
        """Measured times to read one uncached draft token."""

    def choose(
        self,
        requests: Sequence[object],
        row_limits: Sequence[int],
        num_uncached_draft: int = 0,
        drafts_end: bool = False,
    ) -> DraftPlan:
        """How many tokens the next round drafts.

        row_limits: the most draft tokens that each of ``requests`` can use. num_uncached_draft: tokens that the drafter
        must read before it can draft again. drafts_end: whether the drafts end by themselves.
        """
        if self.fixed_draft_len is not None:
            return DraftPlan(min(self.fixed_draft_len, max(row_limits)))
        longest, self._common = min(self.max_draft_len, max(row_limits)), 0.0
        if longest == 0:
            return _PLAIN
        known, prior = self._of_batch(len(row_limits)), self._prior(len(row_limits))
        if prior is None and len(known.medians) < 2:
            return DraftPlan(1, (math.inf,) if drafts_end else ()) if known.medians else _PLAIN
        times = known.estimate(prior or self._guess)
        overall = self._overall.rate(0.5, 2.0)
        alphas = [self._own.get(request, _UNKNOWN).rate(overall, self.tuning.own_rate_tokens) for request in requests]
        batch = _Batch(alphas, row_limits, longest, times[: longest + 1])
        by_row = self._by_row and len(row_limits) > 1
        is_measured = by_row and drafts_end  # What drafting yields a second. The latest rounds tell.
        best = self._best_by_row(batch, drafts_end) if by_row else max(batch.rates()[1:])
        plain = len(row_limits) / (known.latest(0, times[0]) if is_measured else times[0])
        ending = self._ending(batch, max(plain, best), by_row) if drafts_end else None
        self.drafting = best >= self.tuning.min_gain * plain
        if not self.drafting and not is_measured:
            self.drafting = self._may_pay(batch, overall)
        uncached_time = num_uncached_draft * self._uncached_token_time(times) if num_uncached_draft else 0.0
        if not self.drafting:
            return self._trial(batch, known, ending if by_row else None, uncached_time)
        if longest < self.max_draft_len and uncached_time > (longest + 1) * (times[0] - len(row_limits) / best):
            self.drafting = False  # All texts end before the time is paid back in which the draft would read them.
            return self._kept(_PLAIN)
        if best / plain < self.tuning.clear_gain and self._measures_plain():
            return _PLAIN
        # Where drafts end, lengths vary by themselves, so times need no optimism to be found out.
        if ending:
            return self._kept(ending)
        return self._longest_that_pays(batch._replace(times=known.optimistic(batch.times)), by_row)

    def _kept(self, plan: DraftPlan) -> DraftPlan:
        """``plan``, for as many rounds as it may stand: at first there is much to learn from each of them."""
        return plan._replace(rounds=min(self.tuning.plan_rounds, 1 + int(self.tuning.plan_share * self._rounds)))

    def _measures_plain(self) -> bool:
        """Whether T(0) is measured by this round though drafting pays."""
        if self._plain_left:
            self._plain_left -= 1
            return True
        if self._since_plain < self.tuning.non_speculative_every:
            return False
        self._plain_left = 0 if self._measurements % self.tuning.run_every else PostDraftSlowdown.ROUNDS - 1
        self._measurements += 1
        return True

    def _best_by_row(self, batch: _Batch, drafts_end: bool) -> float:
        """The most tokens a second that drafts of different lengths yield."""
        if not drafts_end:
            return share(batch.times, self._expected(batch).draft_step, batch.alphas, batch.limits)[1]
        self._common = max(batch.rates()[1:])
        expected = self._ending_gain.rate(_ENDING_GAIN) * self._common
        return self._speeds.setdefault(len(batch.limits), Speed()).rate(expected)

    def _ending(self, batch: _Batch, tokens_per_second: float, by_row: bool) -> DraftPlan:
        """The plan of a round whose drafts end where they no longer pay."""
        if by_row:
            expected = self._expected(batch)
            worth = min_survival(expected.passes[: batch.longest], tokens_per_second, len(batch.limits))
            return DraftPlan(
                batch.longest, min_survival=worth, tokens_per_second=tokens_per_second, draft_step=expected.draft_step
            )
        alpha = sum(batch.alphas) / len(batch.alphas)
        return DraftPlan(batch.longest, min_expected_survivors(batch.times, tokens_per_second, alpha))

    def _may_pay(self, batch: _Batch, overall: float) -> bool:
        """Whether drafting pays if more drafts are accepted than were so far. overall: the rate of all requests."""
        # Two standard errors of the acceptance rate: until it is known well, drafting goes on where it may pay.
        doubt = 2 * math.sqrt(overall * (1 - overall) / (2 + self._evaluated))
        plain, *drafting = batch.rates(doubt)
        return max(drafting) >= self.tuning.min_gain * plain

    def _trial(self, batch: _Batch, known: RoundTimes, ending: DraftPlan | None, uncached_time: float) -> DraftPlan:
        """The plan of a round that drafts though it does not seem to pay, or of a plain one where it costs too much."""
        times, longest = batch.times, batch.longest
        # Optimistically, a length beyond the longest tried one takes no longer than that one.
        tried = max([1, *(g for g in known.medians if g <= longest)])
        last = min(tried + 1, longest)
        rates = batch._replace(longest=last, times=[times[min(g, tried)] for g in range(last + 1)]).rates()
        trial = max(range(1, last + 1), key=rates.__getitem__)
        # Only after a non-speculative step: those between trials tell what trials cost.
        can_afford = self._since_plain == 0 and self._trials.can_afford(times[trial] - times[0] + uncached_time)
        return (ending or DraftPlan(trial))._replace(draft_len=trial) if can_afford else self._kept(_PLAIN)

    def _longest_that_pays(self, batch: _Batch, by_row: bool) -> DraftPlan:
        """The plan of a round whose drafts do not end by themselves."""
        if by_row:
            lens, _ = share(batch.times, self._expected(batch).draft_step, batch.alphas, batch.limits)
            lens = lens if any(lens) else [min(1, limit) for limit in batch.limits]
            return DraftPlan(max(lens), row_lens=lens)
        rates = batch.rates()[1:]
        return DraftPlan(max(range(len(rates)), key=rates.__getitem__) + 1)

    def observe(
        self,
        draft_len: float,
        seconds: float | None,
        requests: Sequence[object],
        rows: Sequence[tuple[int, int]],
        num_uncached_draft: int = 0,
        all_dropped: bool = False,
    ) -> None:
        """Learn from a round.

        draft_len: the most tokens that a row drafted, or with ``by_row`` their mean. seconds: its time; None if later
        rounds of its kind take another time. rows: accepted and evaluated draft tokens of each of ``requests``.
        num_uncached_draft: as in ``choose``. all_dropped: whether the draft ran, and nothing of it was verified.
        """
        if self.fixed_draft_len is not None:
            return
        self._rounds += 1
        drafted = all_dropped or draft_len > 0
        self._since_plain = self._since_plain + 1 if drafted else 0
        window = self.tuning.rate_window_tokens
        for request, (accepted, evaluated) in zip(requests, rows, strict=True):
            self._own.setdefault(request, AcceptanceRate()).add(accepted, evaluated, window)
            self._overall.add(accepted, evaluated, window)
            self._evaluated += evaluated
        seconds = self._slowdown.settled(drafted, seconds)
        if seconds is None:
            return
        known, lost, committed = self._of_batch(len(rows)), 0.0, len(rows) + sum(accepted for accepted, _ in rows)
        if drafted and 0 in known.medians:
            lost = seconds - known.medians[0] * committed / len(rows)
        self._trials.add(seconds, lost)
        if drafted and self._by_row:
            self._speeds.setdefault(len(rows), Speed()).add(committed, seconds)
            if self._common:
                self._ending_gain.add(committed, self._common * seconds)
        if all_dropped:
            return  # It took longer than T(0), and tells nothing of the others.
        whole = max(1, round(draft_len)) if draft_len else 0
        if not (draft_len and num_uncached_draft) and whole == draft_len:
            known.add(whole, seconds)
            return
        times = known.estimate(self._prior(len(rows)) or self._guess)
        usual = time_of(times, draft_len)
        if not (draft_len and num_uncached_draft):
            known.add(whole, seconds * times[whole] / usual)
        elif known.medians:
            self._uncached_token_times.append(max(0.0, seconds - usual) / num_uncached_draft)

    def _of_batch(self, batch_size: int) -> RoundTimes:
        return self._times.setdefault(batch_size, RoundTimes(self.tuning.times))

    def _prior(self, batch_size: int) -> Sequence[float] | None:
        """The expected times T(0) to T(max_draft_len), whatever was measured of this batch size. None: not known."""
        if self._built_prior:
            return self._built_prior(batch_size).rounds
        others = [size for size, times in self._times.items() if size != batch_size and len(times.medians) > 1]
        if not others:
            return None
        nearest = min(others, key=lambda size: max(size, batch_size) / min(size, batch_size))
        return self._times[nearest].estimate(self._guess)

    def _expected(self, batch: _Batch) -> ExpectedTimes:
        """What was expected before any round, at the pace of now."""
        if not self._built_prior:
            return ExpectedTimes(batch.times)
        rounds, draft_step = self._built_prior(len(batch.limits))
        pace = batch.times[0] / rounds[0]
        return ExpectedTimes([pace * time for time in rounds], pace * draft_step)

    def _uncached_token_time(self, times: Sequence[float]) -> float:
        """The time to read one uncached draft token. times: those of rounds, by draft length."""
        if self._uncached_token_times:
            return statistics.median(self._uncached_token_times)
        return self.tuning.uncached_token_share * (times[1] - times[0])


@dataclass
class Trials:
    """The cost of drafting where it does not pay. Old seconds lose weight as new ones come."""

    tuning: Tuning
    elapsed_seconds: float = field(default=0.0, init=False)
    lost_seconds: float = field(default=0.0, init=False)
    """Seconds that drafting has cost beyond what it has saved."""

    def add(self, seconds: float, lost: float) -> None:
        """Count a round. lost: its seconds minus those of non-speculative steps that yield as many tokens."""
        keep = math.exp(-seconds / self.tuning.loss_window_seconds)
        self.elapsed_seconds = self.elapsed_seconds * keep + seconds
        self.lost_seconds = max(0.0, self.lost_seconds * keep + lost)

    def can_afford(self, seconds: float) -> bool:
        """Whether a trial that costs ``seconds`` may run now."""
        return self.lost_seconds + seconds <= self.tuning.trial_time_share * self.elapsed_seconds
