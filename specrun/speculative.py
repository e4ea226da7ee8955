"""The loop: rounds decide tokens, requests commit them, until every request has ended."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specrun.draft_length import DraftLength
from specrun.request import Piece, Request
from specrun.rounds import Round


@dataclass(frozen=True)
class Event:
    """Tokens that a round committed to one request."""

    request: Request
    pieces: list[Piece]


class SpeculativeLoop:
    """Decodes batches by one kind of round, each as long as ``lengths`` chooses."""

    def __init__(self, rounds: Round, lengths: DraftLength) -> None:
        self.round = rounds
        self.lengths = lengths

    def run(self, requests: Sequence[Request]) -> Iterator[Event]:
        """Decode ``requests`` as one batch to their ends; yields what each round commits."""
        began = time.perf_counter()
        self.round.start(requests)
        self.lengths.start(len(requests))
        while any(request.remaining for request in requests):
            # The target adds a token of its own, so the last token of a request is never drafted.
            draft_len = self.lengths.choose([max(0, request.remaining - 1) for request in requests])
            before = time.perf_counter()
            outcomes = self.round.step(requests, draft_len)
            evaluated = [outcome.evaluated if outcome else (0, 0) for outcome in outcomes]
            self.lengths.observe(draft_len, time.perf_counter() - before, evaluated)
            for request, outcome in zip(requests, outcomes, strict=True):
                if outcome is None or not request.remaining:
                    continue
                pieces = request.commit(outcome.accepted, outcome.following)
                request.stats.count_round(outcome.drafted, len(outcome.accepted), len(pieces))
                request.stats.seconds = time.perf_counter() - began
                yield Event(request, pieces)
