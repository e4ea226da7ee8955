"""The round on the host, in numpy. It is the reference for the round on a device."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Sequence

from specrun.acceptance import accept_logits, accept_tokens, certain
from specrun.drafters import Drafter, Proposal
from specrun.errors import BackendError, SpecError, as_spec_error
from specrun.request import Outcome, Request, longest
from specrun.rounds import EngineTimes
from specrun.rounds.cached import CachedRound
from specrun.runners.host import ModelRunner
from specrun.runners.scored import ScoredTexts
from specrun.sampling import (
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
        self, requests: Sequence[Request], draft_len: int, may_queue_next: bool = False
    ) -> list[Outcome | SpecError]:
        """See ``Round``. Rounds after a prompt, a rejection or full acceptance are all the same."""
        began = time.perf_counter()
        proposals = self._propose(requests, draft_len)
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
            self.drafter.observe(requests, outcomes, draft_len)
        self.seconds = time.perf_counter() - began
        return outcomes

    def close(self) -> None:
        """See ``Round``."""
        self.target.backend.close()
        if self.drafter:
            self.drafter.close()

    def _missing_bytes(self, requests: Sequence[Request], used: int) -> int:
        return self.target.missing_bytes(len(requests), longest(requests[used:], self.max_draft_len), used)

    def _propose(self, requests: Sequence[Request], draft_len: int) -> list[Proposal]:
        counts = [request.num_draft_tokens(draft_len) for request in requests]
        proposals = [Proposal.begin(request, self.max_draft_len) for request in requests]
        if self.drafter and any(counts):
            self.drafter.propose(requests, counts, proposals)
        return proposals

    def _outcome(self, request: Request, proposal: Proposal, logits: Floats) -> Outcome | SpecError:
        """What ``_accept`` returns; or what it raises, which fails this request alone."""
        try:
            return self._accept(request, proposal, logits)
        except Exception as error:
            return as_spec_error(error)

    def _accept(self, request: Request, proposal: Proposal, logits: Floats) -> Outcome:
        """Decide how many of the g proposed tokens stand, and the token after them.

        logits: the target's, [g + 1, V]. Raises BackendError where they are not finite.
        """
        params, position, drafts = request.params, len(request.tokens), proposal.tokens
        adjusted: Iterable[Floats] = logits
        if request.has_logits_processors:
            adjusted = (request.apply_penalties(row, drafts[:i]) for i, row in enumerate(logits))
        if not request.accepts_by_logits(self.use_logits):
            choices = (sample(row, params, position + i) for i, row in enumerate(adjusted))
            accepted, next_token = accept_tokens(drafts, choices)
        else:
            target = (probabilities(row, params) for row in adjusted)
            uniforms = (uniform(params.seed, Purpose.ACCEPT, position + i) for i in range(len(drafts)))
            probs = proposal.probs or certain(drafts, logits.shape[1])
            accepted, weights = accept_logits(drafts, probs, target, uniforms)
            noise = exponential_noise(params.seed, Purpose.TARGET, position + accepted, len(weights))
            next_token = gumbel_argmax(weights, noise)
        logprobs = None
        if request.logprobs is not None:
            chosen = zip(logits, (*drafts[:accepted], next_token), strict=False)
            logprobs = [log_probability(row, token, request.logprobs) for row, token in chosen]
            if any(math.isnan(logprob) for logprob, _ in logprobs):
                raise BackendError(NON_FINITE_LOGITS)
        return Outcome(len(drafts), drafts[:accepted], next_token, logprobs, proposal.forced)
