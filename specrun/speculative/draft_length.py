"""How many tokens to draft: finds, while decoding, the draft length that yields the most tokens a second.

A round of draft length g takes T(g) seconds and yields 1 + alpha + .. + alpha^g tokens of a row, where alpha is the
acceptance rate (arXiv 2211.17192). Both are measured. A non-speculative step is a round with g = 0. Each round:

1. The best g has the most expected tokens a second. The time of a length that was rarely tried counts as a little
   shorter, so that it is tried.
2. If even that promises less than ``_MIN_GAIN``, the round is plain. Now and then a trial drafts nevertheless, because
   only drafting shows whether it has begun to pay. Trials cost at most ``_TRIAL_SHARE`` of the time.
3. Two plain rounds follow behind the first ones that drafted, and now and then while drafting promises little, so that
   T(0) stays known.
4. Where drafts can end by themselves, they may have as many tokens as the rows can use, and end where another token
   costs more time than it is worth (``DraftPlan``). If rows of a batch drop tokens by themselves, acceptance rates are
   those of the others and promise too much. Then the measured yield of rounds that draft stands in their place.
5. What can be looked up in place of a model's draft costs no draft step, so it is looked up in plain rounds too. All of
   the above is about the model's drafts, and learns from no other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from specrun.drafters.acceptance_rate import AcceptanceRate
from specrun.drafters.draft_plan import DraftPlan
from specrun.errors import SpecError
from specrun.request.request import Request
from specrun.speculative.round import RoundResult
from specrun.speculative.round_times import ExpectedTimes, RoundTimes

_MIN_GAIN = 1.02
"""The factor by which drafting must promise more tokens a second than non-speculative steps."""
_CLEAR_GAIN = 1.25
"""The factor below which T(0) is measured again: behind ``_FIRST_PLAIN`` rounds, and later every ``_PLAIN_EVERY``."""
_PLAIN_EVERY, _FIRST_PLAIN = 32, 4
_SETTLED = 2
"""The plain round behind one that drafted from which on the time tells: drafts displace the target's weights from the
processor's caches."""
_TRIAL_SHARE = 0.01
"""The largest share of the time that trials may cost."""
_TRIAL_WINDOW = 8192
"""Rounds after which a trial's cost has lost most of its weight."""
_RATE_WINDOW = 128.0
"""Evaluated draft tokens after which older ones have lost most of their weight."""
_REQUEST_TOKENS = 12.0
"""A request's own rate counts as much as that of all requests once it has so many evaluated draft tokens."""
_YIELD_WINDOW = 64
"""Rounds that draft after which older ones have lost most of their weight in the measured yield."""
_EXPECTED_ROUNDS = 16
"""Rounds of one row that the expected yield counts as at first. They are older than all others."""
_UNCACHED_SHARE = 0.25
"""Time to read one uncached draft token, as a share of a draft step's."""
_DRAFT_TOKEN_SHARE = 0.3
"""Time that a draft token adds to a round, as a share of T(0), where engines were not timed."""


@dataclass
class _Yield:
    """Tokens a second of rounds that draft: of later ones more than of earlier ones."""

    expected_rounds: float
    """Rounds that what was expected still counts as."""
    tokens: float = 0.0
    seconds: float = 0.0
    rounds: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Count a round."""
        keep = 1 - 1 / _YIELD_WINDOW
        self.tokens = self.tokens * keep + tokens
        self.seconds = self.seconds * keep + seconds
        self.rounds = self.rounds * keep + 1
        self.expected_rounds *= keep

    def rate(self, expected: float) -> float:
        """Tokens a second. expected: before any round was counted."""
        if not self.rounds:
            return expected
        weight = self.expected_rounds * self.seconds / self.rounds
        return (self.tokens + expected * weight) / (self.seconds + weight)


class DraftLength:
    """Chooses the draft length of every round. Owns the measured round times and acceptance rates of its decoder."""

    def __init__(
        self,
        max_draft_len: int,
        fixed_draft_len: int | None,
        expected: Callable[[int], ExpectedTimes] | None = None,
        skips_unused_tokens: bool = False,
        looks_up: bool = False,
    ) -> None:
        """fixed_draft_len: the draft length of every round; None: the best one, 0 to ``max_draft_len``.

        expected: the times of rounds of so many rows, where engines were timed. skips_unused_tokens: whether a pass
        takes as long as its rows have tokens together, not as the longest one has. looks_up: whether drafts can be
        looked up in place of the model's.
        """
        self.max_draft_len = max_draft_len
        self.fixed_draft_len = fixed_draft_len
        self.drafting = bool(max_draft_len) and fixed_draft_len != 0
        """Whether drafting pays, as far as is known. If it does, the draft reads prompts when the target does."""
        self._expected = expected
        self._skips_unused_tokens = skips_unused_tokens
        self._looks_up = looks_up
        self._times: dict[int, RoundTimes] = {}
        """Round times, by batch size."""
        self._yields: dict[int, _Yield] = {}
        """Yields of rounds that draft, by batch size."""
        self._overall = AcceptanceRate()
        self._request_rates: WeakKeyDictionary[Request, AcceptanceRate] = WeakKeyDictionary()
        self._evaluated = 0
        """Draft tokens so far of which it is known whether they were accepted."""
        self._since_plain = 0
        """Rounds since the last plain one."""
        self._plain_run = _SETTLED
        """Plain rounds since the last one that drafted. None has drafted yet."""
        self._repeats_plain = False
        """Whether another plain round follows the last one, which came behind one that drafted."""
        self._elapsed = self._lost = 0.0
        """Seconds of rounds, and those that drafting has cost beyond what it has saved. Old ones lose weight."""

    def choose(
        self, requests: Sequence[Request], limits: Sequence[int], num_uncached_draft: int = 0, drafts_end: bool = False
    ) -> DraftPlan:
        """The next round's draft tokens. limits: the most that each of ``requests`` can use.

        num_uncached_draft: tokens that the drafter must read before. drafts_end: whether drafts end by themselves.
        """
        if self.fixed_draft_len is not None:
            return DraftPlan([min(self.fixed_draft_len, limit) for limit in limits])
        rows, longest = len(limits), min(self.max_draft_len, max(limits))
        known, by_row = self._times_of(rows), self._skips_unused_tokens and rows > 1
        plain_plan = _plain(known, limits, by_row) if self._looks_up else DraftPlan([0] * rows)
        if not longest or (self._expected is None and len(self._times) == 1 and not known.counts[0]):
            return plain_plan
        times, alphas = known.seconds[: longest + 1], self._rates(requests)
        rates = _tokens_per_second(alphas, limits, known.optimistic()[: longest + 1])
        best = max(range(1, longest + 1), key=rates.__getitem__)
        plain, *hoped = _tokens_per_second(self._hoped(alphas), limits, times)
        promised = max(hoped)
        if drafts_end and by_row:
            promised = self._yield_of(rows).rate(promised)
        self.drafting = promised >= _MIN_GAIN * plain
        if not self.drafting:
            if not self._may_try(times[best] - times[0] + num_uncached_draft * _UNCACHED_SHARE * (times[1] - times[0])):
                return plain_plan
            longest = best
        elif self._measures_plain(promised / plain, known.counts[0]):
            return plain_plan
        lens = [min(longest if drafts_end else best, limit) for limit in limits]
        plan = _ending(plain_plan._replace(lens=lens), known, by_row, max(plain, promised))
        return plan if drafts_end else _by_rates(plan, alphas)

    def observe(self, requests: Sequence[Request], result: RoundResult, num_uncached_draft: int = 0) -> None:
        """Learn from a round. num_uncached_draft: as it was told to ``choose``."""
        if self.fixed_draft_len is not None:
            return
        rows, committed = len(requests), 0
        for request, outcome in zip(requests, result.outcomes, strict=True):
            accepted, evaluated = (0, 0) if isinstance(outcome, SpecError) else outcome.evaluated
            for rate in (self._overall, self._request_rates.setdefault(request, AcceptanceRate())):
                rate.add(accepted, evaluated, _RATE_WINDOW)
            self._evaluated += evaluated
            committed += 1 + accepted
        drafted = result.all_dropped or result.draft_len > 0
        self._since_plain, self._plain_run = (self._since_plain + 1, 0) if drafted else (0, self._plain_run + 1)
        if result.seconds is None:
            return
        known, keep = self._times_of(rows), 1 - 1 / _TRIAL_WINDOW
        self._elapsed, self._lost = self._elapsed * keep + result.seconds, self._lost * keep
        if drafted:
            self._lost = max(0.0, self._lost + result.seconds - known.seconds[0] * committed / rows)
            self._yield_of(rows).add(committed, result.seconds)
        # A round that reads uncached tokens, or drops all drafts, takes longer than others of its length.
        is_usual = not num_uncached_draft and not result.all_dropped if drafted else self._plain_run >= _SETTLED
        if is_usual or not (drafted or known.counts[0]):
            known.add(result.draft_len, result.seconds)

    def _times_of(self, rows: int) -> RoundTimes:
        """Where engines were not timed, a batch size begins with the times of the nearest one."""
        if rows not in self._times:
            if self._expected:
                expected = self._expected(rows)
            elif self._times:
                nearest = min(self._times, key=lambda size: max(size, rows) / min(size, rows))
                expected = ExpectedTimes(self._times[nearest].seconds)
            else:
                expected = ExpectedTimes([1 + _DRAFT_TOKEN_SHARE * g for g in range(self.max_draft_len + 1)])
            self._times[rows] = RoundTimes(expected)
        return self._times[rows]

    def _yield_of(self, rows: int) -> _Yield:
        return self._yields.setdefault(rows, _Yield(expected_rounds=_EXPECTED_ROUNDS / rows))

    def _rates(self, requests: Sequence[Request]) -> list[float]:
        """Acceptance rates of the rows."""
        overall, unknown = self._overall.rate(0.5, 2.0), AcceptanceRate()
        return [self._request_rates.get(request, unknown).rate(overall, _REQUEST_TOKENS) for request in requests]

    def _hoped(self, alphas: Sequence[float]) -> list[float]:
        """Two standard errors above ``alphas``: until they are known well, drafting goes on where it may pay."""
        overall = self._overall.rate(0.5, 2.0)
        doubt = 2 * math.sqrt(overall * (1 - overall) / (2 + self._evaluated))
        return [min(1.0, alpha + doubt) for alpha in alphas]

    def _may_try(self, cost: float) -> bool:
        """Whether a trial may run that costs so many seconds: behind plain rounds, which tell what it costs."""
        return self._plain_run >= _SETTLED and self._lost + cost <= _TRIAL_SHARE * self._elapsed

    def _measures_plain(self, gain: float, measured: float) -> bool:
        """Whether T(0) is measured by this round though drafting pays.

        gain: in tokens a second, as a factor. measured: so many plain rounds were.
        """
        is_due = self._since_plain >= min(_PLAIN_EVERY, _FIRST_PLAIN * (1 + measured))
        if self._repeats_plain or (is_due and (gain < _CLEAR_GAIN or not measured)):
            self._repeats_plain = not self._repeats_plain
            return True
        return False


def _plain(known: RoundTimes, limits: Sequence[int], by_row: bool) -> DraftPlan:
    """The plan of a round in which only what is looked up is drafted. A single row's tokens take time of their own."""
    rows, times = len(limits), RoundTimes(known.expected_now().without_steps())
    return _ending(DraftPlan([0] * rows, lookup_lens=limits), times, by_row or rows == 1, rows / times.seconds[0])


def _ending(plan: DraftPlan, known: RoundTimes, by_row: bool, tokens_per_second: float) -> DraftPlan:
    """``plan``, with drafts that end where the batch would write more in the time of another token.

    by_row: whether each row's token takes time of its own beside the draft step of all rows. Else a round takes the
    time of its longest draft.
    """
    times = known.expected_now() if by_row else ExpectedTimes(known.seconds)
    gains = [tokens_per_second * (later - sooner) for sooner, later in itertools.pairwise(times.rounds)]
    if not by_row:
        return plan._replace(min_step_gain=gains)
    step_gain = tokens_per_second * times.draft_step
    token_gains = [max(0.0, gain - step_gain) / len(plan.lens) for gain in gains]
    return plan._replace(min_survival=token_gains, min_step_gain=[step_gain] * len(gains))


def _tokens_per_second(alphas: Sequence[float], limits: Sequence[int], times: Sequence[float]) -> list[float]:
    """Expected tokens a second of rounds with 0, 1, .. g draft tokens a row.

    alphas, limits: each row's acceptance rate and the most draft tokens it can use. times: [g + 1], of the rounds.
    """
    tokens = [0.0] * len(times)
    for alpha, limit in zip(alphas, limits, strict=True):  # Twice a round, so ``expected_tokens`` would take too long.
        expected = power = 1.0
        for g in range(len(times)):
            tokens[g] += expected
            if g < limit:
                power *= alpha
                expected += power
    return [total / seconds for total, seconds in zip(tokens, times, strict=True)]


def _by_rates(plan: DraftPlan, alphas: Sequence[float]) -> DraftPlan:
    """``plan`` for drafts that do not end by themselves: each row has the tokens that survive at its own rate."""
    rows = zip(alphas, plan.lens, strict=True)
    lens = [sum(plan.keeps(index, alpha ** (index + 1)) for index in range(most)) for alpha, most in rows]
    return DraftPlan(lens if any(lens) else plan.lens, lookup_lens=plan.lookup_lens)
