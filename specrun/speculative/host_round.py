"""The round on the host, in numpy. It is the reference for the round on a device."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence

from specrun.drafters import Drafter, Proposal
from specrun.drafters.draft_plan import DraftPlan
from specrun.errors import BackendError, SpecError, as_spec_error
from specrun.request.request import Outcome, Request, longest
from specrun.runners.host_runner import ModelRunner
from specrun.runners.prompt_logprobs import ScoredTexts
from specrun.sampling.acceptance import accept_logits, accept_tokens, deterministic
from specrun.sampling.sampler import (
    NON_FINITE_LOGITS,
    Floats,
    Purpose,
    exponential_noise,
    gumbel_argmax,
    log_probability,
    probabilities,
    sample,
    uniform,
)
from specrun.speculative import EngineTimes
from specrun.speculative.base_round import CachedRound


class HostRound(CachedRound[ModelRunner, Drafter]):
    """See ``Round``."""

    next_is_queued = False
    prefill_chunk_size = 64  # On a CPU, every further token of a call takes nearly as long as the first.

    def __init__(self, target: ModelRunner, drafter: Drafter | None, max_draft_len: int, use_logits: bool) -> None:
        super().__init__(target, drafter if max_draft_len else None, ScoredTexts(target))
        self.is_steady_state, self.seconds = False, 0.0
        self._seen: set[tuple[int, int]] = set()
        self.max_draft_len = max_draft_len
        self.use_logits = use_logits

    @property
    def host_target(self) -> ModelRunner:
        """See ``Round``."""
        return self.target

    def engine_times(self) -> EngineTimes:
        """See ``Round``."""
        draft = self.drafter.engine_time() if self.drafter else (0.0, 0)
        return EngineTimes(self.target.seconds, self.target.calls, *draft)

    def admit(self, requests: Sequence[Request], first: int) -> None:
        """See ``Round``."""
        self.target.reserve(first + len(requests), longest(requests, self.max_draft_len), first)
        super().admit(requests, first)

    def step(
        self, requests: Sequence[Request], plan: DraftPlan, may_queue_next: bool = False
    ) -> list[Outcome | SpecError]:
        """See ``Round``. Rounds after a prompt, a rejection or full acceptance are all the same."""
        began = time.perf_counter()
        proposals = self._propose(requests, plan)
        drafts = [proposal.tokens for proposal in proposals]
        shape = (len(requests), max(map(len, drafts)))
        self.is_steady_state = shape in self._seen  # An engine's first call of a shape takes longer.
        self._seen.add(shape)
        for row, request in enumerate(requests):
            # The last committed token is fed in every round, because its logits start the round.
            self.target.rows.rewind(row, len(request.tokens) - 1)
        num_logits = [len(tokens) + 1 for tokens in drafts]
        logits = self.target.forward([request.tokens for request in requests], num_logits, drafts)
        outcomes = [
            self._outcome(request, proposals[row], logits[row, : num_logits[row]])
            for row, request in enumerate(requests)
        ]
        if self.drafter:
            self.drafter.observe(requests, outcomes, plan.draft_len)
        self.seconds = time.perf_counter() - began
        return outcomes

    def close(self) -> None:
        """See ``Round``."""
        self.target.backend.close()
        if self.drafter:
            self.drafter.close()

    def _missing_bytes(self, requests: Sequence[Request], used: int) -> int:
        return self.target.missing_bytes(len(requests), longest(requests[used:], self.max_draft_len), used)

    def _propose(self, requests: Sequence[Request], plan: DraftPlan) -> list[Proposal]:
        counts = [request.num_draft_tokens(plan.draft_len) for request in requests]
        proposals = [Proposal.begin(request, self.max_draft_len) for request in requests]
        if self.drafter and any(counts):
            self.drafter.propose(requests, counts, proposals, plan.end_below)
        return proposals

    def _outcome(self, request: Request, proposal: Proposal, logits: Floats) -> Outcome | SpecError:
        """What ``_accept`` returns, or the error that it raises. The error fails this request alone."""
        try:
            return self._accept(request, proposal, logits)
        except Exception as error:
            return as_spec_error(error)

    def _accept(self, request: Request, proposal: Proposal, logits: Floats) -> Outcome:
        """Decide how many of the g proposed tokens stand, and the token after them.

        logits: the target's, [g + 1, V]. Raises BackendError where the first of them are not finite, and RequestError
        where the request's constraint and biases leave no token there. Such an error behind accepted draft tokens is
        left to the next round, which begins there: the text may end before it.
        """
        drafts, place = proposal.tokens, 0

        def adjusted() -> Iterator[Floats]:
            nonlocal place
            for place, row in enumerate(logits):
                yield request.apply_penalties(row, drafts[:place]) if request.has_logits_processors else row

        try:
            accepted, next_token = self._decide(request, proposal, adjusted(), logits.shape[1])
        except Exception:
            if not place:
                raise
            accepted, next_token = place - 1, drafts[place - 1]
        logprobs = None
        if request.logprobs is not None:
            chosen = zip(logits, (*drafts[:accepted], next_token), strict=False)
            logprobs = [log_probability(row, token, request.logprobs) for row, token in chosen]
            # A constraint may have hidden what is not finite from the choice.
            sound = next((i for i, (logprob, _) in enumerate(logprobs) if math.isnan(logprob)), len(logprobs))
            if not sound:
                raise BackendError(NON_FINITE_LOGITS)
            if sound <= accepted:
                accepted, next_token = sound - 1, drafts[sound - 1]
        return Outcome(len(drafts), drafts[:accepted], next_token, logprobs, proposal.forced)

    def _decide(
        self, request: Request, proposal: Proposal, logits: Iterator[Floats], vocab_size: int
    ) -> tuple[int, int]:
        """How many of the g proposed tokens stand, and the token after them.

        logits: the target's at g + 1 places, [V] each. No more of them are taken than are needed.
        """
        params, position, drafts = request.params, len(request.tokens), proposal.tokens
        if not request.accepts_by_logits(self.use_logits):
            return accept_tokens(drafts, (sample(row, params, position + i) for i, row in enumerate(logits)))
        target = (probabilities(row, params) for row in logits)
        uniforms = (uniform(params.seed, Purpose.ACCEPT, position + i) for i in range(len(drafts)))
        probs = proposal.probs or deterministic(drafts, vocab_size)
        accepted, weights = accept_logits(drafts, probs, target, uniforms)
        noise = exponential_noise(params.seed, Purpose.TARGET, position + accepted, len(weights))
        return accepted, gumbel_argmax(weights, noise)
