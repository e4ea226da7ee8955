"""Drafts that are right at a chosen rate, because the texts are known: what a better drafter would bring."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from weakref import WeakKeyDictionary

from typing_extensions import override

from specrun.drafters import Drafter, Proposal
from specrun.drafters.draft_plan import DraftPlan
from specrun.errors import SpecError
from specrun.kv_cache.rows import RowIds
from specrun.request.request import Outcome, Request


class SyntheticDrafter(Drafter):
    """In place of each token of another drafter, which takes its time, it proposes the target's own one or a wrong one.

    So every text stays the target's own. Without another drafter, drafts take no time.
    """

    def __init__(self, inner: Drafter | None, rate: float, vocab_size: int) -> None:
        """rate: of draft tokens that are right."""
        self.texts = inner.texts if inner else None
        self._inner = inner
        self._rate, self._vocab_size = rate, vocab_size
        self._random = random.Random(0)
        self._known: WeakKeyDictionary[Request, Sequence[int]] = WeakKeyDictionary()

    def tell(self, outputs: Iterable[tuple[Request, Sequence[int]]]) -> None:
        """What the target will write for requests. Those of others are drafted as the other drafter does."""
        self._known.update(outputs)

    @override
    def propose(self, requests: Sequence[Request], plan: DraftPlan, forced: RowIds) -> list[Proposal]:
        proposals = self._inner.propose(requests, plan, forced) if self._inner else [*map(Proposal.begin, forced)]
        return [
            self._replaced(request, proposal, count) if request in self._known else proposal
            for request, proposal, count in zip(requests, proposals, plan.lens, strict=True)
        ]

    def _replaced(self, request: Request, proposal: Proposal, planned: int) -> Proposal:
        count = len(proposal.tokens) if self._inner else planned
        start = len(request.tokens) - len(request.prompt) + proposal.forced
        correct = self._known[request][start : start + max(0, count - proposal.forced)]
        drawn = [token if self._random.random() < self._rate else (token + 1) % self._vocab_size for token in correct]
        return Proposal([*proposal.tokens[: proposal.forced], *drawn], forced=proposal.forced)

    @override
    def admit(self, requests: Sequence[Request]) -> None:
        if self._inner:
            self._inner.admit(requests)

    @override
    def release(self, request: Request) -> None:
        if self._inner:
            self._inner.release(request)

    @override
    def ends_drafts(self, requests: Sequence[Request]) -> bool:
        return self._inner is not None and self._inner.ends_drafts(requests)

    @override
    def observe(self, requests: Sequence[Request], outcomes: Sequence[Outcome | SpecError], draft_len: int) -> None:
        if self._inner:
            self._inner.observe(requests, outcomes, draft_len)

    @override
    def close(self) -> None:
        if self._inner:
            self._inner.close()
