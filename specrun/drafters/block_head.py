"""A head that drafts in one pass: the logits of all of a round's draft tokens come together.

None of them has seen the others. So a draft token is drawn from what its place alone says, which is what acceptance
takes it for. With a Markov head it is drawn from that and what the token before it adds; that is what acceptance takes
it for then. What is fed behind a text is the head's own matter; here it is 0.

A head that says how surely a token will be accepted may end a draft, before the token is drawn: whether a place is
drafted must not depend on what is drawn there (DSpark, section 3.3).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from typing_extensions import override

from specrun.drafters import Proposal
from specrun.drafters.draft_plan import DraftPlan
from specrun.drafters.head import HeadDrafter
from specrun.drafters.markov import Markov
from specrun.errors import SpecError
from specrun.kv_cache.rows import RowIds
from specrun.request.request import Outcome, Request
from specrun.runners.cached_texts import DraftTexts
from specrun.runners.host_runner import ModelRunner
from specrun.sampling.sampler import Floats


class ParallelDrafter(HeadDrafter):
    """All draft tokens of a round come from one pass."""

    def __init__(
        self,
        runner: ModelRunner,
        vocab_size: int,
        max_draft_len: int,
        use_logits: bool,
        confidence: float | None = 0.0,
        markov: Markov | None = None,
    ) -> None:
        """Arguments as for ``ModelDrafter``. confidence: a confidence head, where there is one, decides in place of the
        draft's own probabilities, and in all texts. markov: matrices of a Markov head.
        """
        self._graph = runner.backend.config.graph
        asks_head = self._graph.has_confidence and confidence is not None
        super().__init__(runner, vocab_size, max_draft_len, use_logits, 0.0 if asks_head else confidence)
        self._markov = markov
        self._least = _logit(confidence) if asks_head and confidence is not None else -math.inf
        """The lowest logit of the confidence head with which a draft goes on."""
        self._block: Floats
        """[B, g or more, V]: the logits of this round's draft tokens."""

    @override
    def _texts_of(self, runner: ModelRunner, max_draft_len: int) -> DraftTexts:
        first_step_len = runner.backend.config.graph.reread_len(max_draft_len)
        return DraftTexts(runner, max_draft_len, self._use_logits, first_step_len, keeps_to_target=True)

    @override
    def ends_drafts(self, requests: Sequence[Request]) -> bool:
        return self._least > -math.inf or super().ends_drafts(requests)

    @override
    def _num_valid(self, request: Request, outcome: Outcome | SpecError) -> int:
        """Nothing of the block stays, which began with the last committed token."""
        return len(request.tokens) - 1

    @override
    def _read(self, requests: Sequence[Request], plan: DraftPlan, forced: RowIds) -> Floats:
        """Returns the logits of all of a round's draft tokens: forced ones change nothing of those behind them."""
        wanted = [max(1, count) for count in plan.lens]
        behind = [[0] * (count - self._graph.sample_from_anchor) for count in wanted]
        self._block = self.runner.forward([request.tokens for request in requests], wanted, behind)
        return self._block

    @override
    def _extend(self, growing: Collection[int]) -> Floats:
        """Nothing is fed: drafted tokens change nothing of those behind them, but by ``Markov``."""
        return self._block

    @override
    def _next_logits(self, logits: Floats, request: Request, proposal: Proposal) -> Floats:
        row: Floats = logits[len(proposal.tokens)]
        return self._markov.applied(row, (proposal.tokens or request.tokens)[-1]) if self._markov else row

    @override
    def _draw(self, logits: Floats, request: Request, proposal: Proposal) -> None:
        """The draft ends before a token of which the confidence head expects too little."""
        if not logits[-1] < self._least:
            super()._draw(logits, request, proposal)


def _logit(probability: float) -> float:
    if probability in (0, 1):
        return math.inf if probability else -math.inf
    return math.log(probability / (1 - probability))
