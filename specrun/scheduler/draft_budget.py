"""How many draft tokens each row of a batch has, where a pass takes as long as its rows have tokens together.

A draft token is worth the probability that it is accepted with all of its draft before it. It costs the time by which
it makes the round longer, in which the batch could have written tokens at its usual speed. So every row drafts as long
as its next token is worth more than that price, and rows whose drafts are good have more of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

_EXPECTED_ROUNDS = 8
"""Rounds that the expected speed counts as."""
_ROUNDS = 64
"""Rounds after which older ones have lost most of their weight."""


def time_of(seconds: Sequence[float], draft_len: float) -> float:
    """The time of a round whose rows have ``draft_len`` draft tokens on average. seconds: T(0), T(1), .."""
    whole = min(int(draft_len), len(seconds) - 2)
    return seconds[whole] + (draft_len - whole) * (seconds[whole + 1] - seconds[whole])


def share(
    seconds: Sequence[float], draft_step: float, alphas: Sequence[float], limits: Sequence[int]
) -> tuple[list[int], float]:
    """The draft length of each row that yields the most tokens a second, and how many these are.

    seconds: T(0), T(1), .. of rounds in which all rows have as many draft tokens. draft_step: the part of it that is
    a draft step, which takes as long for one row as for all. alphas, limits: each row's acceptance rate and the most
    draft tokens it can use.
    """
    batch = len(alphas)
    counts = [0] * batch
    best, expected = [0] * batch, float(batch)
    rate = batch / seconds[0]
    worth = [(-alpha, row) for row, (alpha, limit) in enumerate(zip(alphas, limits, strict=True)) if limit]
    heapq.heapify(worth)
    for total in range(1, batch * (len(seconds) - 1) + 1):
        if not worth:
            break
        value, row = worth[0]
        counts[row] += 1
        expected -= value
        mean = total / batch
        found = expected / (time_of(seconds, mean) + (max(counts) - mean) * draft_step)
        if found > rate:
            rate, best = found, counts.copy()
        if counts[row] < min(limits[row], len(seconds) - 1):
            heapq.heapreplace(worth, (value * alphas[row], row))
        else:
            heapq.heappop(worth)
    return best, rate


def prices(passes: Sequence[float], tokens_per_second: float, batch: int) -> list[float]:
    """See ``DraftPlan.prices``. passes: the target's time for each further draft token of all rows."""
    return [max(0.0, tokens_per_second * seconds / batch) for seconds in passes]


@dataclass
class Speed:
    """Tokens a second of rounds that draft: of later ones more than of earlier ones."""

    tokens: float = 0.0
    seconds: float = 0.0
    rounds: float = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """Count a round."""
        keep = 1 - 1 / _ROUNDS
        self.tokens = self.tokens * keep + tokens
        self.seconds = self.seconds * keep + seconds
        self.rounds = self.rounds * keep + 1

    def rate(self, expected: float) -> float:
        """Tokens a second. expected: before any round was counted."""
        if not self.rounds:
            return expected
        weight = _EXPECTED_ROUNDS * self.seconds / self.rounds
        return (self.tokens + expected * weight) / (self.seconds + weight)
