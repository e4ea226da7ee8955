"""The loop: rounds decide tokens, requests commit them, until every request has ended."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specrun.request import Piece, Request
from specrun.rounds import Round


@dataclass(frozen=True)
class Event:
    """Tokens that a round committed to one request."""

    request: Request
    pieces: list[Piece]


class SpeculativeLoop:
    """Decodes batches by one kind of round."""

    def __init__(self, rounds: Round) -> None:
        self.round = rounds

    def run(self, requests: Sequence[Request]) -> Iterator[Event]:
        """Decode ``requests`` as one batch to their ends; yields what each round commits."""
        began = time.perf_counter()
        self.round.start(requests)
        while any(request.remaining for request in requests):
            for request, outcome in zip(requests, self.round.step(requests), strict=True):
                if outcome is None or not request.remaining:
                    continue
                pieces = request.commit(outcome.accepted, outcome.following)
                request.stats.count_round(outcome.drafted, len(outcome.accepted), len(pieces))
                request.stats.seconds = time.perf_counter() - began
                yield Event(request, pieces)
