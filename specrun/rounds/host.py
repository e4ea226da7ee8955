"""The round on the host: engines called through numpy arrays. The reference for every other round."""

from __future__ import annotations

from collections.abc import Sequence

from specrun.acceptance import accept_logits, accept_tokens
from specrun.drafter import Drafter, Proposal
from specrun.model_runner import ModelRunner
from specrun.request import Request
from specrun.rounds import Outcome
from specrun.sampling import Floats, Purpose, choose, exponentials, probabilities, race, uniform


class HostRound:
    """See ``Round``."""

    def __init__(self, target: ModelRunner, draft: ModelRunner | None, draft_len: int, use_logits: bool) -> None:
        self.target = target
        self.draft_len = draft_len
        self.use_logits = use_logits
        self.drafter = Drafter(draft, target.vocab_size, use_logits) if draft and draft_len else None

    def start(self, requests: Sequence[Request]) -> None:
        """See ``Round``."""
        longest = max(len(request.tokens) + request.remaining for request in requests)
        for runner in self._runners():
            runner.start(len(requests), longest + self.draft_len + 1)

    def step(self, requests: Sequence[Request], draft_len: int) -> list[Outcome | None]:
        """See ``Round``. A prompt, a rejection and a last token take the same path."""
        for row, request in enumerate(requests):
            for runner in self._runners():
                # The last committed token is fed again at most once: its logits start the round.
                runner.rewind(row, len(request.tokens) - 1)
        rows = [list(request.tokens) for request in requests]
        # The target adds a token of its own, so the last token of a request is never drafted.
        counts = [max(0, min(draft_len, request.remaining - 1)) for request in requests]
        proposals = self.drafter.propose(requests, rows, counts) if self.drafter else [Proposal() for _ in requests]
        active = [request.remaining > 0 for request in requests]
        keep = [len(p.tokens) + 1 if yes else 0 for p, yes in zip(proposals, active, strict=True)]
        logits = self.target.forward(rows, keep)
        return [
            self._accept(request, proposals[row], logits[row, : keep[row]]) if active[row] else None
            for row, request in enumerate(requests)
        ]

    def close(self) -> None:
        """See ``Round``."""

    def _accept(self, request: Request, proposal: Proposal, logits: Floats) -> Outcome:
        """How many of the proposed tokens stand, and the token after them; logits [g + 1, V] are the target's."""
        params, position, drafts = request.params, len(request.tokens), proposal.tokens
        if params.greedy or not self.use_logits:
            choices = (choose(row, params, position + i) for i, row in enumerate(logits))
            accepted, following = accept_tokens(drafts, choices)
            return Outcome(len(drafts), drafts[:accepted], following)
        target = (probabilities(row, params) for row in logits)
        uniforms = (uniform(params.seed, Purpose.ACCEPT, position + i) for i in range(len(drafts)))
        accepted, weights = accept_logits(drafts, proposal.probs, target, uniforms)
        noise = exponentials(params.seed, Purpose.TARGET, position + accepted, len(weights))
        return Outcome(len(drafts), drafts[:accepted], race(weights, noise))

    def _runners(self) -> list[ModelRunner]:
        return [self.target, self.drafter.runner] if self.drafter else [self.target]
