"""What a policy is told of rounds that never ran."""

from __future__ import annotations

from collections.abc import Sequence

from specrun.request.request import Outcome, Request
from specrun.sampling.sampler import SamplingParams
from specrun.speculative.round import RoundResult


def text() -> Request:
    """A request of which nothing but its identity counts."""
    return Request([0], SamplingParams(), 1)


def told(draft_len: float, seconds: float | None, rows: Sequence[tuple[int, int]]) -> RoundResult:
    """A round of rows of so many accepted and evaluated draft tokens."""
    outcomes = [Outcome(evaluated, [0] * accepted, 0) for accepted, evaluated in rows]
    return RoundResult([*outcomes], seconds, draft_len)
