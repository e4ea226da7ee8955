"""A draft model, and suffix matching where that promises more tokens a second."""

from __future__ import annotations

import time
from collections.abc import Sequence

from specrun.drafters import Drafter, Proposal
from specrun.drafters.acceptance_rate import AcceptanceRate
from specrun.drafters.suffix import SuffixDrafter
from specrun.errors import SpecError
from specrun.request.request import Outcome, Request

_MIN_GAIN = 1.1
"""The factor by which suffix matching must promise more tokens a second. The model must read what it did not draft, and
where one of two estimates is chosen because it is higher, it is mostly too high."""


class HybridDrafter:
    """See ``Drafter``. Each row of each round is drafted by one of the two.

    The model's cache falls behind in rows that it does not draft for, as that of a draft that rests.
    """

    def __init__(self, model: Drafter, use_logits: bool) -> None:
        """use_logits: of requests that do not say."""
        self.model = model
        self.suffix = SuffixDrafter(use_logits)
        self._accepted = AcceptanceRate()
        """Of the model's draft tokens."""
        self._by_model: set[Request] = set()
        """The requests for which the model drafted in this round."""
        self._drafted = 0.0
        """Tokens that the model drafts in a round: a running mean. It may end drafts early."""
        self._step_seconds = self._verify_seconds = 0.0
        """Of one draft step, and of what follows drafting in a round: running means."""
        self._proposed_at = 0.0

    def propose(
        self,
        requests: Sequence[Request],
        counts: Sequence[int],
        proposals: Sequence[Proposal],
        end_below: Sequence[float] = (),
    ) -> None:
        """See ``Drafter``."""
        left = list(counts)
        for row, (request, proposal) in enumerate(zip(requests, proposals, strict=True)):
            if counts[row] and not proposal.tokens:
                found = self.suffix.find(request, counts[row])
                if found.tokens and self._is_better(found.expected, counts[row]):
                    proposal.tokens = found.tokens
                    left[row] = 0
        self._by_model = {request for request, count in zip(requests, left, strict=True) if count}
        if self._by_model:
            began = time.perf_counter()
            others = [proposal if count else Proposal() for proposal, count in zip(proposals, left, strict=True)]
            self.model.propose(requests, left, others, end_below)
            drafted = max(1, *(len(proposal.tokens) - proposal.forced for proposal in others))
            self._step_seconds = _mean(self._step_seconds, (time.perf_counter() - began) / drafted)
            self._drafted = _mean(self._drafted, drafted)
        self._proposed_at = time.perf_counter()

    def observe(self, requests: Sequence[Request], outcomes: Sequence[Outcome | SpecError], draft_len: int) -> None:
        """See ``Drafter``."""
        if draft_len:
            self._verify_seconds = _mean(self._verify_seconds, time.perf_counter() - self._proposed_at)
        for request, outcome in zip(requests, outcomes, strict=True):
            if request in self._by_model and not isinstance(outcome, SpecError):
                self._accepted.add(*outcome.evaluated, 256.0)
        self._by_model = set()
        self.suffix.observe(requests, outcomes, draft_len)
        self.model.observe(requests, outcomes, draft_len)

    def _is_better(self, expected: float, count: int) -> bool:
        """Whether ``expected`` accepted tokens for nothing beat the model's, of ``count`` draft steps."""
        rate = self._accepted.rate(0.7, 4.0)
        count = min(count, max(1, round(self._drafted or count)))
        by_model = sum(rate**step for step in range(1, count + 1))
        slower = 1 + count * self._step_seconds / self._verify_seconds if self._verify_seconds else 1.0
        return (1 + expected) * slower >= _MIN_GAIN * (1 + by_model)

    def admit(self, requests: Sequence[Request], first: int) -> None:
        """See ``Drafter``, as all that follow."""
        self.suffix.admit(requests, first)
        self.model.admit(requests, first)

    def release(self, request: Request, row: int) -> None:
        """See ``Drafter``."""
        self.suffix.release(request, row)
        self.model.release(request, row)

    def missing_bytes(self, requests: Sequence[Request], used: int) -> int:
        """See ``Drafter``."""
        return self.model.missing_bytes(requests, used)

    def tokens_to_prefill(self, requests: Sequence[Request], first: int) -> list[int]:
        """See ``Drafter``."""
        return self.model.tokens_to_prefill(requests, first)

    def prefill(self, requests: Sequence[Request], first: int, max_tokens: int) -> None:
        """See ``Drafter``."""
        self.model.prefill(requests, first, max_tokens)

    def lag(self, requests: Sequence[Request]) -> int:
        """See ``Drafter``."""
        return self.model.lag(requests)

    def ends_drafts(self, requests: Sequence[Request]) -> bool:
        """See ``Drafter``."""
        return self.model.ends_drafts(requests)

    def cache_prefix(self, request: Request, row: int) -> None:
        """See ``Drafter``."""
        self.model.cache_prefix(request, row)

    def swap(self, one: int, other: int) -> None:
        """See ``Drafter``."""
        self.model.swap(one, other)

    def invalidate(self, row: int) -> None:
        """See ``Drafter``."""
        self.model.invalidate(row)

    def engine_time(self) -> tuple[float, int]:
        """See ``Drafter``."""
        return self.model.engine_time()

    def close(self) -> None:
        """See ``Drafter``."""
        self.model.close()


def _mean(before: float, value: float) -> float:
    """A running mean in which old values lose weight."""
    return value if not before else 0.9 * before + 0.1 * value
