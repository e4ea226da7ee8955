"""A draft model, and suffix matching where that promises more tokens a second."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

from typing_extensions import override

from specrun.drafters import Drafter, Proposal
from specrun.drafters.acceptance_rate import AcceptanceRate
from specrun.drafters.draft_plan import DraftPlan
from specrun.drafters.suffix import SuffixDrafter
from specrun.errors import SpecError
from specrun.kv_cache.rows import RowIds
from specrun.request.request import Outcome, Request

_MIN_GAIN = 1.1
"""The factor by which suffix matching must promise more tokens a second. The model must read what it did not draft, and
the higher of two estimates is mostly too high (winner's curse)."""


class HybridDrafter(Drafter):
    """Each row of each round is drafted by one of the two, also where the model's drafts do not pay.

    The model's cache falls behind in rows that it does not draft for, as that of a draft that rests.
    """

    looks_up = True

    def __init__(self, model: Drafter, suffix: SuffixDrafter) -> None:
        self.model = model
        self.texts = model.texts
        self.suffix = suffix
        self._accepted = AcceptanceRate()
        """The acceptance rate of the model's draft tokens."""
        self._drafted = 0.0
        """Tokens that the model drafts in a round: a running mean. It may end drafts early."""
        self._step_seconds = self._verify_seconds = 0.0
        """Running means: seconds of a draft step, and of the part of a round after drafting."""
        self._proposed_at = 0.0

    @override
    def propose(self, requests: Sequence[Request], plan: DraftPlan, forced: RowIds) -> list[Proposal]:
        lookups = plan._replace(lens=plan.lookup_lens or plan.lens)
        matched = self.suffix.find_all(
            requests, lookups, forced, lambda row, hits: self._is_better(hits, plan.lens[row])
        )
        left = [0 if row in matched else count for row, count in enumerate(plan.lens)]
        if any(left):
            began = time.perf_counter()
            proposals = self.model.propose(requests, plan._replace(lens=left), forced)
            drawn = (len(proposal.tokens) - proposal.forced for proposal in proposals)
            drafted = max(1, *itertools.compress(drawn, left))
            self._step_seconds = _mean(self._step_seconds, (time.perf_counter() - began) / drafted)
            self._drafted = _mean(self._drafted, drafted)
        else:
            proposals = list(map(Proposal.begin, forced))
        self._proposed_at = time.perf_counter()
        for row, tokens in matched.items():
            proposals[row] = Proposal(tokens, looked_up=True)
        return proposals

    @override
    def observe(self, requests: Sequence[Request], outcomes: Sequence[Outcome | SpecError], draft_len: int) -> None:
        if draft_len:
            self._verify_seconds = _mean(self._verify_seconds, time.perf_counter() - self._proposed_at)
        for outcome in outcomes:
            if not isinstance(outcome, SpecError):
                self._accepted.add(*outcome.evaluated, 256.0)
        self.suffix.observe(requests, outcomes, draft_len)
        self.model.observe(requests, outcomes, draft_len)

    def _is_better(self, expected: float, count: int) -> bool:
        """Whether a suffix draft of ``expected`` accepted tokens beats the model's draft of ``count`` steps."""
        if not count:
            return True
        rate = self._accepted.rate(0.7, 4.0)
        count = min(count, max(1, round(self._drafted or count)))
        by_model = sum(rate**step for step in range(1, count + 1))
        slower = 1 + count * self._step_seconds / self._verify_seconds if self._verify_seconds else 1.0
        return (1 + expected) * slower >= _MIN_GAIN * (1 + by_model)

    @override
    def admit(self, requests: Sequence[Request]) -> None:
        self.suffix.admit(requests)
        self.model.admit(requests)

    @override
    def release(self, request: Request) -> None:
        self.suffix.release(request)
        self.model.release(request)

    @override
    def ends_drafts(self, requests: Sequence[Request]) -> bool:
        return self.model.ends_drafts(requests)


def _mean(before: float, value: float) -> float:
    """A running mean in which old values lose weight."""
    return value if not before else 0.9 * before + 0.1 * value
