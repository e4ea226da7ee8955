"""The draft model's part of a round: propose tokens for every row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from specrun.errors import SpecError, as_spec_error
from specrun.request import Request
from specrun.runners.host import ModelRunner
from specrun.sampling import Floats, Purpose, choose, exponentials, probabilities, race


@dataclass
class Proposal:
    """What the draft proposes for one row; ``probs`` [g, V] is kept only where acceptance needs it."""

    tokens: list[int] = field(default_factory=list)
    probs: list[Floats] = field(default_factory=list)
    error: SpecError | None = None
    """Why nothing more is proposed, and the request fails: the draft's logits are not numbers, say."""


class Drafter:
    """Draws from the draft model: with the target's own noise for token acceptance, else with noise of its own."""

    def __init__(self, runner: ModelRunner, vocab_size: int, use_logits: bool) -> None:
        self.runner = runner
        self._vocab_size = vocab_size
        self._use_logits = use_logits

    def propose(self, requests: Sequence[Request], counts: Sequence[int]) -> list[Proposal]:
        """Draw ``counts[row]`` draft tokens, which follow the tokens of the request in each row."""
        proposals = [Proposal() for _ in requests]
        most = max(counts)
        for step in range(most):
            if step == 0:
                logits = self.runner.forward([request.tokens for request in requests], [1] * len(requests))
            else:
                logits = self.runner.extend([p.tokens[-1] if len(p.tokens) == step else None for p in proposals])
            for row, request in enumerate(requests):
                proposal = proposals[row]
                if step < counts[row] and not proposal.error:
                    self._draw(logits[row, 0], request, proposal)
        return proposals

    def _draw(self, logits: Floats, request: Request, proposal: Proposal) -> None:
        """Add the token that follows the request's and those of ``proposal``; or why there is none."""
        # A padded embedding may be wider than the target's; ids beyond the target's are never proposed.
        logits = logits[: self._vocab_size]
        params, position = request.params, len(request.tokens) + len(proposal.tokens)
        try:
            if request.adjusts:
                logits = request.adjust(logits, proposal.tokens)
            if request.wants_logits(self._use_logits):
                q = probabilities(logits, params)
                if missing := self._vocab_size - len(q):
                    q = np.pad(q, (0, missing))
                token = race(q, exponentials(params.seed, Purpose.DRAFT, position, len(q)))
                proposal.probs.append(q)
            else:
                token = choose(logits, params, position)
        except Exception as error:
            proposal.error = as_spec_error(error)
            return
        proposal.tokens.append(token)
