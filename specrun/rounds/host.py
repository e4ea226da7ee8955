"""The round on the host: engines called through numpy arrays. The reference for every other round."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from specrun.acceptance import accept_logits, accept_tokens
from specrun.drafters.model import Drafter, Proposal
from specrun.errors import BackendError, SpecError, as_spec_error
from specrun.host_memory import shortage
from specrun.request import Outcome, Request
from specrun.rounds.cached import CachedTexts
from specrun.runners.host import ModelRunner
from specrun.sampling import (
    NOT_NUMBERS,
    Floats,
    Purpose,
    choose,
    exponentials,
    log_probability,
    probabilities,
    race,
    uniform,
)


class HostRound(CachedTexts[ModelRunner]):
    """See ``Round``."""

    piece = 64  # Processors take nearly a token's time for every token.

    def __init__(self, target: ModelRunner, draft: ModelRunner | None, draft_len: int, use_logits: bool) -> None:
        super().__init__(target, draft if draft_len else None)
        self.settled = False
        self._seen: set[tuple[int, int]] = set()
        self.draft_len = draft_len
        self.use_logits = use_logits
        self.drafter = Drafter(self.draft, target.vocab_size, use_logits) if self.draft else None

    def memory_shortage(self, requests: Sequence[Request], used: int) -> SpecError | None:
        """See ``Round``."""
        size = sum(runner.missing_bytes(len(requests), self._longest(requests[used:]), used) for runner in self.runners)
        advice = "ask for shorter outputs, or build with a smaller --max_batch_size"
        return shortage(f"caches for {len(requests)} requests", size, advice) if size else None

    def admit(self, requests: Sequence[Request], first: int) -> None:
        """See ``Round``."""
        for runner in self.runners:
            runner.reserve(first + len(requests), self._longest(requests), first)
        super().admit(requests, first)

    def step(self, requests: Sequence[Request], draft_len: int) -> list[Outcome | SpecError]:
        """See ``Round``. What follows a prompt, a rejection or full acceptance takes the same path."""
        shape = (len(requests), draft_len)
        self.settled = shape in self._seen  # An engine's first call of a shape takes longer.
        self._seen.add(shape)
        for row, request in enumerate(requests):
            for runner in self.runners:
                # The last committed token is fed again at most once: its logits start the round.
                runner.rows.rewind(row, len(request.tokens) - 1)
        counts = [request.draft_count(draft_len) for request in requests]
        proposals = self.drafter.propose(requests, counts) if self.drafter else [Proposal() for _ in requests]
        drafts = [proposal.tokens for proposal in proposals]
        wanted = [len(tokens) + 1 for tokens in drafts]
        logits = self.target.forward([request.tokens for request in requests], wanted, drafts)
        return [
            self._outcome(request, proposals[row], logits[row, : wanted[row]]) for row, request in enumerate(requests)
        ]

    def close(self) -> None:
        """See ``Round``."""
        for runner in self.runners:
            runner.backend.close()

    def _longest(self, requests: Sequence[Request]) -> int:
        """Positions that the longest of them may need."""
        return max(len(request.tokens) + request.remaining for request in requests) + self.draft_len + 1

    def _outcome(self, request: Request, proposal: Proposal, logits: Floats) -> Outcome | SpecError:
        """``_accept``, or what went wrong with this request alone."""
        if proposal.error:
            return proposal.error
        try:
            return self._accept(request, proposal, logits)
        except Exception as error:
            return as_spec_error(error)

    def _accept(self, request: Request, proposal: Proposal, logits: Floats) -> Outcome:
        """How many of the proposed tokens stand, and the token after them.

        logits [g + 1, V] are the target's. Raises BackendError where they are not numbers.
        """
        params, position, drafts = request.params, len(request.tokens), proposal.tokens
        adjusted: Iterable[Floats] = logits
        if request.adjusts:
            adjusted = (request.adjust(row, drafts[:i]) for i, row in enumerate(logits))
        if not request.wants_logits(self.use_logits):
            choices = (choose(row, params, position + i) for i, row in enumerate(adjusted))
            accepted, following = accept_tokens(drafts, choices)
        else:
            target = (probabilities(row, params) for row in adjusted)
            uniforms = (uniform(params.seed, Purpose.ACCEPT, position + i) for i in range(len(drafts)))
            accepted, weights = accept_logits(drafts, proposal.probs, target, uniforms)
            following = race(weights, exponentials(params.seed, Purpose.TARGET, position + accepted, len(weights)))
        logprobs = None
        if request.logprobs is not None:
            chosen = zip(logits, (*drafts[:accepted], following), strict=False)
            logprobs = [log_probability(row, token, request.logprobs) for row, token in chosen]
            if any(math.isnan(logprob) for logprob, _ in logprobs):
                raise BackendError(NOT_NUMBERS)
        return Outcome(len(drafts), drafts[:accepted], following, logprobs)
