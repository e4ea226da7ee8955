"""The draft model's part of a round: propose tokens for every row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from specrun.errors import BackendError
from specrun.model_runner import ModelRunner
from specrun.request import Request
from specrun.sampling import Floats, Purpose, choose, exponentials, probabilities, race


@dataclass
class Proposal:
    """What the draft proposes for one row; ``probs`` [g, V] is kept only where acceptance needs it."""

    tokens: list[int] = field(default_factory=list)
    probs: list[Floats] = field(default_factory=list)
    numbers: bool = True
    """Whether the draft's logits were; where not, nothing more is proposed and the request fails."""


class Drafter:
    """Draws from the draft model: with the target's own noise for token acceptance, else with noise of its own."""

    def __init__(self, runner: ModelRunner, vocab_size: int, use_logits: bool) -> None:
        self.runner = runner
        self._vocab_size = vocab_size
        self._use_logits = use_logits

    def propose(self, requests: Sequence[Request], rows: list[list[int]], counts: Sequence[int]) -> list[Proposal]:
        """Extend each of ``rows`` (committed tokens) by ``counts[row]`` draft tokens; returns them as proposals."""
        proposals = [Proposal() for _ in rows]
        for step in range(max(counts, default=0)):
            drafting = [step < count and p.numbers for count, p in zip(counts, proposals, strict=True)]
            logits = self.runner.forward(rows, [int(yes) for yes in drafting])
            for row, request in enumerate(requests):
                if drafting[row]:
                    self._draw(logits[row, 0], request, rows[row], proposals[row])
        return proposals

    def _draw(self, logits: Floats, request: Request, tokens: list[int], proposal: Proposal) -> None:
        """Add the token that follows ``tokens`` to them and to ``proposal``."""
        # A padded embedding may be wider than the target's; ids beyond the target's are never proposed.
        logits = request.adjust(logits[: self._vocab_size], tokens)
        params, position = request.params, len(tokens)
        try:
            if request.wants_logits(self._use_logits):
                q = np.zeros(self._vocab_size, np.float32)
                q[: len(logits)] = probabilities(logits, params)
                token = race(q, exponentials(params.seed, Purpose.DRAFT, position, len(q)))
                proposal.probs.append(q)
            else:
                token = choose(logits, params, position)
        except BackendError:
            proposal.numbers = False
            return
        tokens.append(token)
        proposal.tokens.append(token)
