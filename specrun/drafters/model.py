"""A draft model on the host."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence

import numpy as np
from typing_extensions import override

from specrun.drafters import Drafter, Proposal
from specrun.drafters.draft_plan import DraftPlan
from specrun.drafters.early_stop import EarlyStop
from specrun.errors import RequestError, SpecError, as_spec_error
from specrun.kv_cache.rows import RowIds
from specrun.request.request import Outcome, Request, num_accepted
from specrun.runners.cached_texts import DraftTexts
from specrun.runners.host_runner import ModelRunner
from specrun.sampling.acceptance import deterministic
from specrun.sampling.sampler import (
    Floats,
    Purpose,
    exponential_noise,
    gumbel_argmax,
    largest_probability,
    probabilities,
    sample,
)


class ModelDrafter(Drafter):
    """It draws with the target's own noise for token acceptance, else with noise of its own."""

    def __init__(
        self, runner: ModelRunner, vocab_size: int, max_draft_len: int, use_logits: bool, confidence: float | None = 0.0
    ) -> None:
        """vocab_size: the target's; ids beyond it are never proposed.

        confidence: a greedy text's draft ends behind a token with which all of it is less probable than this, by the
        draft's own probabilities; 0: never. None: a round's plan says where it ends (``EarlyStop``).
        """
        self.runner = runner
        self._use_logits = use_logits
        self.texts: DraftTexts = self._texts_of(runner, max_draft_len)
        self._confidence = confidence
        self._early_stop = EarlyStop()
        self._proposals: Sequence[Proposal] = ()
        """The proposals of this round."""
        self._vocab_size = vocab_size

    @override
    def propose(self, requests: Sequence[Request], plan: DraftPlan, forced: RowIds) -> list[Proposal]:
        """Steps after a prompt, a rejection or full acceptance are all the same."""
        proposals = self._proposals = list(map(Proposal.begin, forced))
        plan = plan._replace(lens=[*map(self._most_tokens, requests, itertools.count(), plan.lens)])
        for row, request in enumerate(requests):
            self.runner.rows.rewind(row, len(self.texts.ids(request)) - 1)  # The last token's logits start the round.
        self._early_stop.begin(plan if self._confidence is None else DraftPlan(plan.lens))
        growing = [row for row, begun in enumerate(forced) if len(begun) < plan.lens[row]]
        for step in range(plan.draft_len):
            if not growing or self._early_stop.ends_before(step, growing):
                break
            logits = self._extend(growing) if step else self._read(requests, plan, forced)
            growing = [row for row in growing if self._grow(row, logits[row], requests[row], proposals[row], plan)]
        return proposals

    @override
    def observe(self, requests: Sequence[Request], outcomes: Sequence[Outcome | SpecError], draft_len: int) -> None:
        """The cache is valid as far as the draft tokens were accepted."""
        for proposal, outcome in zip(self._proposals, outcomes, strict=False):
            accepted, evaluated = (0, 0) if isinstance(outcome, SpecError) else outcome.evaluated
            self._early_stop.learn(proposal.confidences, accepted, evaluated)
        self._proposals = ()
        for row, (request, outcome) in enumerate(zip(requests, outcomes, strict=True)):
            self.runner.rows.rewind(row, self._num_valid(request, outcome))

    @override
    def ends_drafts(self, requests: Sequence[Request]) -> bool:
        return all(self._ends_draft(request) for request in requests)

    def _texts_of(self, runner: ModelRunner, max_draft_len: int) -> DraftTexts:
        """The cache of the model."""
        return DraftTexts(runner, max_draft_len, self._use_logits)

    def _num_valid(self, request: Request, outcome: Outcome | SpecError) -> int:
        """Positions of a row that are right behind a round, before its tokens are committed."""
        return len(request.tokens) + num_accepted(outcome)

    def _most_tokens(self, request: Request, row: int, count: int) -> int:
        """Draft tokens of a row for which ``count`` are planned."""
        return 0 if request.draft_error or self.texts.begins_later(request, row) else count

    def _read(self, requests: Sequence[Request], plan: DraftPlan, forced: RowIds) -> Floats:
        """Feed what the cache lacks of texts and forced tokens. Returns the logits behind them, [B, 1 or more, V]."""
        return self.runner.forward(*self.texts.inputs(requests, forced, plan.lens))

    def _extend(self, growing: Collection[int]) -> Floats:
        """Feed the last token of each row in ``growing``. Returns the logits behind these, [B, 1 or more, V]."""
        last = [proposal.tokens[-1] if row in growing else None for row, proposal in enumerate(self._proposals)]
        return self.runner.extend([None if token is None else self._draft_id(token) for token in last])

    def _draft_id(self, token: int) -> int:
        """The draft model's id of a token that it has proposed."""
        return token

    def _next_logits(self, logits: Floats, request: Request, proposal: Proposal) -> Floats:
        """The logits [V] of the token behind those of ``proposal``. logits: the row's, [1 or more, V]."""
        row: Floats = logits[0]
        return row

    def _ends_draft(self, request: Request) -> bool:
        """Whether the request's drafts end where they are improbable.

        Of a token that is drawn with noise, its probability does not say whether the target agrees.
        """
        return self._confidence != 0 and request.options.fixed_draft_len is None and request.params.greedy

    def _grow(self, row: int, logits: Floats, request: Request, proposal: Proposal, plan: DraftPlan) -> bool:
        """Draw the next token of a row, up to those of ``plan`` in all. Returns whether another one may follow."""
        length = len(proposal.tokens)
        self._draw(self._next_logits(logits, request, proposal), request, proposal)
        if len(proposal.tokens) == length:
            return False
        if confidences := proposal.confidences:
            if not self._early_stop.keeps(row, length, confidences[-1]):
                proposal.drop_last()
                return False
            if math.prod(confidences) < (self._confidence or 0.0):
                return False
        return length + 1 < plan.lens[row]

    def _draw(self, logits: Floats, request: Request, proposal: Proposal) -> None:
        """Add the token that follows the request's and those of ``proposal``.

        A constraint that allows none of the model's tokens ends this draft; another error, the request's drafting.
        """
        params, position = request.params, len(request.tokens) + len(proposal.tokens)
        try:  # A padded embedding may be wider than the target's.
            logits = request.apply_penalties(logits[: self._vocab_size], proposal.tokens)
            confidence = [largest_probability(logits)] if self._ends_draft(request) else []
            if request.accepts_by_logits(self._use_logits):
                q = probabilities(logits, params.at(position))
                if missing := self._vocab_size - len(q):
                    q = np.pad(q, (0, missing))
                token = gumbel_argmax(q, exponential_noise(params.seed, Purpose.DRAFT, position, len(q)))
                proposal.probs = [*(proposal.probs or deterministic(proposal.tokens, self._vocab_size)), q]
            else:
                token = sample(logits, params, position)
            proposal.tokens.append(token)
            proposal.confidences += confidence
        except RequestError:
            pass
        except Exception as error:
            request.stop_drafting(as_spec_error(error))
