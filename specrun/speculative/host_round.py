"""The round on the host, in numpy. It is the reference for the round on a device."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

from typing_extensions import override

from specrun.backends.pass_timing import times_here
from specrun.drafters import Drafter, Proposal
from specrun.drafters.draft_plan import DraftPlan
from specrun.engine_dir.pass_times import PairTimes
from specrun.errors import BackendError, SpecError, as_spec_error
from specrun.request.request import Outcome, Request
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
from specrun.speculative.round import EngineTimes, Round, RoundResult, TargetLogits


class HostRound(Round[ModelRunner, Drafter]):
    """A round in numpy."""

    prefill_chunk_size = 64  # On a CPU, every further token of a call takes nearly as long as the first.

    def __init__(self, target: ModelRunner, drafter: Drafter | None, max_draft_len: int, use_logits: bool) -> None:
        """Arguments as for ``Round``."""
        super().__init__(target, drafter, max_draft_len, use_logits, ScoredTexts(target, max_draft_len))
        self.host_target = target
        self.skips_unused_tokens = target.backend.config.backend.skips_unused_tokens
        if self._draft_texts and self._draft_texts.keeps_to_target:
            target.head = self._draft_texts.runner
        self._can_read_prompts = self.skips_unused_tokens and not (target.has_states or target.head)

    @override
    def target_logits(self) -> TargetLogits:
        return self.target

    @override
    def reads_prompts(self, requests: Sequence[Request], first: int, max_tokens: int) -> bool:
        """A pass less: the weights are read once. Scored prompts and heads need the prompt before."""
        if not self._can_read_prompts or any(request.options.prompt_logprobs is not None for request in requests):
            return False
        return max(self._texts.tokens_to_prefill(requests, first)) <= min(max_tokens, self.target.most_tokens - 1)

    @override
    def step(self, requests: Sequence[Request], plan: DraftPlan, may_queue_next: bool = False) -> RoundResult:
        """Rounds after a prompt, a rejection or full acceptance are all the same."""
        began, calls = time.perf_counter(), self._draft_calls
        lengths = self.target.rows.lengths
        prompts = [row for row, request in enumerate(requests) if lengths[row] < len(request.tokens) - 1]
        proposals = self._draft(requests, plan)
        logits = self._verify(requests, proposals)
        outcomes = [self._accept(*row) for row in zip(requests, proposals, logits, strict=True)]
        if self.drafter:
            self.drafter.observe(requests, outcomes, plan.draft_len)
        for row in prompts:
            self._texts.cache_prefix(requests[row], row)
        # Later rounds of this shape read no prompt, and may have draft steps.
        unlike = bool(prompts) or any(proposal.looked_up for proposal in proposals)
        seconds = None if unlike else time.perf_counter() - began
        drafted = [len(proposal.tokens) - proposal.forced for proposal in proposals]
        draft_len = sum(drafted) / len(drafted) if self.skips_unused_tokens else max(drafted)
        return RoundResult(outcomes, seconds, draft_len, not draft_len and self._draft_calls > calls)

    def _draft(self, requests: Sequence[Request], plan: DraftPlan) -> list[Proposal]:
        """What is proposed for each request. What its grammar forces needs no drafter, and may be more than planned."""
        forced = [request.forced(self.max_draft_len) for request in requests]
        if self.drafter and (plan.draft_len or plan.lookup_lens):
            return self.drafter.propose(requests, plan, forced)
        return list(map(Proposal.begin, forced))

    def _verify(self, requests: Sequence[Request], proposals: Sequence[Proposal]) -> Floats:
        """The target's logits behind each text and each of its g draft tokens: [B, max(g) + 1 or more, V]."""
        drafts = [proposal.tokens for proposal in proposals]
        for row, request in enumerate(requests):
            # The last committed token is fed in every round, because its logits start the round.
            self.target.rows.rewind(row, len(request.tokens) - 1)
        num_logits = [len(tokens) + 1 for tokens in drafts]
        return self.target.forward([request.tokens for request in requests], num_logits, drafts)

    def _accept(self, request: Request, proposal: Proposal, logits: Floats) -> Outcome | SpecError:
        """How many of the g proposed tokens stand, and the token after them. logits: the target's, [g + 1 or more, V].

        An error, of logits that are not finite or a constraint that leaves no token, fails this request alone. Behind
        accepted draft tokens it is left to the next round, which begins there: the text may end before it.
        """
        drafts, index = proposal.tokens, 0

        def adjusted() -> Iterator[Floats]:
            nonlocal index
            for index, row in enumerate(logits[: len(drafts) + 1]):
                yield request.apply_penalties(row, drafts[:index])

        try:
            accepted, next_token = self._decide(request, proposal, adjusted())
        except Exception as error:
            if not index:
                return as_spec_error(error)
            accepted, next_token = index - 1, drafts[index - 1]
        outcome = Outcome(len(drafts), drafts[:accepted], next_token, None, proposal.forced, proposal.looked_up)
        return _with_logprobs(outcome, logits, request.options.logprobs)

    def _decide(self, request: Request, proposal: Proposal, logits: Iterator[Floats]) -> tuple[int, int]:
        """How many of g proposed tokens stand, and the token after them. logits: [V], g + 1 times; taken as needed."""
        params, position, drafts = request.params, len(request.tokens), proposal.tokens
        if not request.accepts_by_logits(self.use_logits):
            return accept_tokens(drafts, (sample(row, params, position + i) for i, row in enumerate(logits)))
        target = (probabilities(row, params.at(position + i)) for i, row in enumerate(logits))
        uniforms = (uniform(params.seed, Purpose.ACCEPT, position + i) for i in range(len(drafts)))
        probs = proposal.probs or deterministic(drafts, self.target.vocab_size)
        accepted, weights = accept_logits(drafts, probs, target, uniforms)
        noise = exponential_noise(params.seed, Purpose.TARGET, position + accepted, len(weights))
        return accepted, gumbel_argmax(weights, noise)

    @override
    def engine_times(self) -> EngineTimes:
        draft = self._draft_texts.runner if self._draft_texts else None
        drafted = (draft.seconds, draft.calls) if draft else (0.0, 0)
        return EngineTimes(self.target.seconds, self.target.calls, *drafted)

    @override
    def pass_times(self) -> PairTimes | None:
        target = times_here(self.target.backend)
        if target is None or self._draft_texts is None:
            return PairTimes(target, None) if target else None
        draft = times_here(self._draft_texts.runner.backend)
        return PairTimes(target, draft) if draft else None

    @override
    def close(self) -> None:
        self.target.backend.close()
        if self.drafter:
            self.drafter.close()

    @property
    def _draft_calls(self) -> int:
        """How often the draft's engine was called."""
        return self._draft_texts.runner.calls if self._draft_texts else 0

    @override
    def waits_for(self, request: Request) -> Future[Any] | None:
        """A mask that takes long."""
        return request.matcher.begin_mask() if request.matcher else None


def _with_logprobs(outcome: Outcome, logits: Floats, count: int | None) -> Outcome | SpecError:
    """``outcome`` with log-probabilities, the ``count`` best among them. logits: the target's, [g + 1 or more, V].

    count: None where none are wanted. A constraint may have hidden logits that are not finite from the choice. Then the
    outcome ends before them. An error where nothing is before them.
    """
    if count is None:
        return outcome
    tokens = [*outcome.accepted, outcome.next_token]
    logprobs = [log_probability(row, token, count) for row, token in zip(logits, tokens, strict=False)]
    sound = next((i for i, (logprob, _) in enumerate(logprobs) if math.isnan(logprob)), len(logprobs))
    if not sound:
        return BackendError(NON_FINITE_LOGITS)
    return outcome._replace(accepted=tokens[: sound - 1], next_token=tokens[sound - 1], logprobs=logprobs)
