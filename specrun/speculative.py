"""The round: draft, verify, accept, commit, rewind. A prompt, a rejection and a last token take the same path."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from specrun.acceptance import accept_logits, accept_tokens
from specrun.drafter import Drafter, Proposal
from specrun.model_runner import ModelRunner
from specrun.request import Piece, Request
from specrun.sampling import Floats, Purpose, choose, exponentials, probabilities, race, uniform


@dataclass(frozen=True)
class Event:
    """Tokens that a round committed to one request."""

    request: Request
    pieces: list[Piece]


class SpeculativeLoop:
    """Decodes batches with a target and, optionally, a draft that proposes ``draft_len`` tokens a round.

    ``use_logits`` chooses modified rejection sampling over comparing tokens; for greedy requests they are the same.
    """

    def __init__(self, target: ModelRunner, draft: ModelRunner | None, draft_len: int, use_logits: bool) -> None:
        self.target = target
        self.draft_len = draft_len
        self.use_logits = use_logits
        self.drafter = Drafter(draft, target.vocab_size, use_logits) if draft and draft_len else None

    def run(self, requests: Sequence[Request]) -> Iterator[Event]:
        """Decode ``requests`` as one batch to their ends; yields what each round commits."""
        began = time.perf_counter()
        longest = max(len(request.tokens) + request.remaining for request in requests)
        for runner in self._runners():
            runner.start(len(requests), longest + self.draft_len + 1)
        while any(request.remaining for request in requests):
            for event in self._round(requests):
                event.request.stats.seconds = time.perf_counter() - began
                yield event

    def _round(self, requests: Sequence[Request]) -> list[Event]:
        rows = [list(request.tokens) for request in requests]
        # The target adds a token of its own, so the last token of a request is never drafted.
        counts = [max(0, min(self.draft_len, request.remaining - 1)) for request in requests]
        proposals = self.drafter.propose(requests, rows, counts) if self.drafter else [Proposal() for _ in requests]
        active = [request.remaining > 0 for request in requests]
        keep = [len(p.tokens) + 1 if yes else 0 for p, yes in zip(proposals, active, strict=True)]
        logits = self.target.forward(rows, keep)
        events = []
        for row, request in enumerate(requests):
            if active[row]:
                accepted, following = self._accept(request, proposals[row], logits[row, : keep[row]])
                pieces = request.commit(proposals[row].tokens[:accepted], following)
                request.stats.count_round(len(proposals[row].tokens), accepted, len(pieces))
                events.append(Event(request, pieces))
            for runner in self._runners():
                # The last committed token is fed again at most once: its logits start the next round.
                runner.rewind(row, len(request.tokens) - 1)
        return events

    def _accept(self, request: Request, proposal: Proposal, logits: Floats) -> tuple[int, int]:
        """How many of the proposed tokens stand, and the token after them; logits [g + 1, V] are the target's."""
        params, position = request.params, len(request.tokens)
        if params.greedy or not self.use_logits:
            return accept_tokens(proposal.tokens, choose(logits, params, position))
        q = np.array(proposal.probs).reshape(-1, logits.shape[-1])
        uniforms = [uniform(params.seed, Purpose.ACCEPT, position + i) for i in range(len(proposal.tokens))]
        accepted, weights = accept_logits(proposal.tokens, q, probabilities(logits, params), uniforms)
        noise = exponentials(params.seed, Purpose.TARGET, position + accepted, len(weights))
        return accepted, race(weights, noise)

    def _runners(self) -> list[ModelRunner]:
        return [self.target, self.drafter.runner] if self.drafter else [self.target]
