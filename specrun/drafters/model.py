"""A draft model on the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specrun.acceptance import certain
from specrun.drafters import Proposal
from specrun.errors import RequestError, SpecError, as_spec_error
from specrun.request import Outcome, Request, longest, num_accepted
from specrun.runners.cached import CachedDraft
from specrun.runners.host import ModelRunner
from specrun.sampling import (
    Floats,
    Purpose,
    exponential_noise,
    gumbel_argmax,
    largest_probability,
    probabilities,
    sample,
)


class ModelDrafter(CachedDraft[ModelRunner]):
    """See ``Drafter``. It draws with the target's own noise for token acceptance, else with noise of its own."""

    def __init__(
        self, runner: ModelRunner, vocab_size: int, max_draft_len: int, use_logits: bool, confidence: float = 0.0
    ) -> None:
        """vocab_size: the target's; ids beyond it are never proposed.

        confidence: a greedy text's draft ends behind a token with which all of it is less probable.
        """
        super().__init__(runner)
        self._confidence = confidence
        self._vocab_size = vocab_size
        self._max_draft_len = max_draft_len
        self._use_logits = use_logits

    def missing_bytes(self, requests: Sequence[Request], used: int) -> int:
        """See ``Drafter``."""
        return self.runner.missing_bytes(len(requests), self._longest(requests[used:]), used)

    def admit(self, requests: Sequence[Request], first: int) -> None:
        """See ``Drafter``."""
        self.runner.reserve(first + len(requests), self._longest(requests), first)
        super().admit(requests, first)

    def propose(self, requests: Sequence[Request], counts: Sequence[int], proposals: Sequence[Proposal]) -> None:
        """See ``Drafter``. What follows a prompt, a rejection or full acceptance takes the same path."""
        for row, request in enumerate(requests):
            self.runner.rows.rewind(row, len(self.ids(request)) - 1)  # The last token's logits start the round.
        begun = [list(proposal.tokens) for proposal in proposals]
        for step in range(max(count - len(tokens) for count, tokens in zip(counts, begun, strict=True))):
            ends = [len(tokens) + step for tokens in begun]
            growing = [
                len(proposal.tokens) == end < count
                and not request.draft_error
                and proposal.confidence >= self._confidence
                for request, proposal, end, count in zip(requests, proposals, ends, counts, strict=True)
            ]
            if not any(growing):
                break
            if step == 0:
                logits = self._read(requests, begun)
            else:
                rows = zip(proposals, growing, strict=True)
                logits = self.runner.extend([self._own_id(p.tokens[-1]) if grows else None for p, grows in rows])
            for row, request in enumerate(requests):
                if growing[row]:
                    self._draw(logits[row, 0], request, proposals[row])

    def observe(self, requests: Sequence[Request], outcomes: Sequence[Outcome | SpecError], draft_len: int) -> None:
        """See ``Drafter``. The cache is valid as far as the draft tokens were accepted."""
        for row, (request, outcome) in enumerate(zip(requests, outcomes, strict=True)):
            self.runner.rows.rewind(row, len(request.tokens) + num_accepted(outcome))

    def ends_drafts(self, requests: Sequence[Request]) -> bool:
        """See ``Drafter``."""
        return all(self._ends(request) for request in requests)

    def engine_time(self) -> tuple[float, int]:
        """See ``Drafter``."""
        return self.runner.seconds, self.runner.calls

    def close(self) -> None:
        """See ``Drafter``."""
        self.runner.backend.close()

    def _read(self, requests: Sequence[Request], begun: Sequence[Sequence[int]]) -> Floats:
        """Feed what the cache lacks of the requests' texts, and the tokens behind them that are drafted already.

        Returns the logits of the last ones, [B, 1 or more, V].
        """
        return self.runner.forward([self.ids(request) for request in requests], [1] * len(requests), begun)

    def _own_id(self, token: int) -> int:
        """The model's own id of a token that it has proposed."""
        return token

    def _longest(self, requests: Sequence[Request]) -> int:
        """Positions of a row that the longest of ``requests`` may need, drafts included."""
        return longest(requests, self._max_draft_len)

    def _ends(self, request: Request) -> bool:
        """Whether the request's drafts end where they are improbable.

        Of a token that is drawn with noise, its probability does not say whether the target agrees.
        """
        return self._confidence > 0 and request.params.greedy and request.draft_len is None

    def _draw(self, logits: Floats, request: Request, proposal: Proposal) -> None:
        """Add the token that follows the request's and those of ``proposal``.

        Nothing is added where the request's constraint allows none of the tokens that could be proposed: only this
        branch ends there. Another error stops the request's drafting.
        """
        # A padded embedding may be wider than the target's; ids beyond the target's are never proposed.
        logits = logits[: self._vocab_size]
        params, position = request.params, len(request.tokens) + len(proposal.tokens)
        try:
            if request.has_logits_processors:
                logits = request.apply_penalties(logits, proposal.tokens)
            if self._ends(request):
                proposal.confidence *= largest_probability(logits)
            if request.accepts_by_logits(self._use_logits):
                q = probabilities(logits, params)
                if missing := self._vocab_size - len(q):
                    q = np.pad(q, (0, missing))
                token = gumbel_argmax(q, exponential_noise(params.seed, Purpose.DRAFT, position, len(q)))
                proposal.probs = proposal.probs or certain(proposal.tokens, self._vocab_size)
                proposal.probs.append(q)
            else:
                token = sample(logits, params, position)
        except RequestError:
            return
        except Exception as error:
            request.stop_drafting(as_spec_error(error))
            return
        proposal.tokens.append(token)
