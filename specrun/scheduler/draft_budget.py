"""What draft tokens yield and cost: where another one pays, for a batch and for each row.

In engines that skip unused tokens a pass takes as long as its rows have tokens together. There a draft token is worth
the probability that it is accepted with all of its draft before it. It costs the time by which it makes the round
longer, in which the batch could have written tokens at its usual speed. So every row drafts as long as its next token
is worth more than that, and rows whose drafts are good have more of them.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from specrun.request.stats import expected_tokens

_EXPECTED_ROUNDS = 8
"""Rounds that the expected speed counts as. They are older than all others."""
_ROUNDS = 64
"""Rounds after which older ones have lost most of their weight."""


def batch_tokens(alphas: Sequence[float], row_limits: Sequence[int], longest: int) -> list[float]:
    """Expected tokens of a round of a batch, for every draft length from 0 to ``longest``.

    alphas, row_limits: each row's acceptance rate and the most draft tokens it can use.
    """
    tokens = [0.0] * (longest + 1)
    for alpha, limit in zip(alphas, row_limits, strict=True):
        expected = power = 1.0
        for g in range(longest + 1):
            tokens[g] += expected
            if g < limit:
                power *= alpha
                expected += power
    return tokens


def min_expected_survivors(seconds: Sequence[float], tokens_per_second: float, alpha: float) -> list[float]:
    """How many rows' drafts must be likely to stand behind 1, 2, .. draft tokens, for more of them to pay.

    seconds: T(0), T(1), .. T(g). alpha: how likely another token is accepted whose draft stood so far. To go on from
    i to j draft tokens takes T(j) - T(i) seconds and yields alpha + .. + alpha^(j - i) tokens a surviving row. That
    must be no slower than ``tokens_per_second``, for the best j. Times rise. Returns [g]; the last is infinite.
    """
    least, most = [], alpha / (1 - alpha) if alpha < 1 else math.inf
    for i in range(1, len(seconds)):
        best, power, yielded = math.inf, 1.0, 0.0
        for later in seconds[i + 1 :]:
            power *= alpha
            yielded += power
            tokens = tokens_per_second * (later - seconds[i])
            best = min(best, tokens / yielded)
            if tokens >= best * most:  # Nor would any longer draft be better, whatever it yields.
                break
        least.append(best)
    return least


def time_of(seconds: Sequence[float], draft_len: float) -> float:
    """The time of a round whose rows have ``draft_len`` draft tokens on average. seconds: T(0), T(1), .."""
    whole = min(int(draft_len), len(seconds) - 2)
    return seconds[whole] + (draft_len - whole) * (seconds[whole + 1] - seconds[whole])


def share(
    seconds: Sequence[float], draft_step: float, alphas: Sequence[float], limits: Sequence[int]
) -> tuple[list[int], float]:
    """The draft length of each row that yields the most tokens a second, and how many these are.

    seconds: T(0), T(1), .. of rounds in which all rows have as many draft tokens; they rise. draft_step: the part of
    it that is a draft step, which takes as long for one row as for all. alphas, limits: each row's acceptance rate and
    the most draft tokens it can use.
    """
    batch, longest = len(alphas), len(seconds) - 1
    limits = [min(limit, longest) for limit in limits]
    expected, rate = float(batch), batch / seconds[0]
    most = sum(map(expected_tokens, alphas, limits))
    worth = [(-alpha, row) for row, (alpha, limit) in enumerate(zip(alphas, limits, strict=True)) if limit]
    heapq.heapify(worth)
    given, num_best = list[int](), 0
    counts, highest = [0] * batch, 0
    while worth:
        value, row = worth[0]
        given.append(row)
        counts[row] = own = counts[row] + 1
        highest = max(highest, own)
        expected -= value
        mean = len(given) / batch
        at_least = time_of(seconds, mean)
        found = expected / (at_least + (highest - mean) * draft_step)
        if found > rate:
            rate, num_best = found, len(given)
        elif most <= rate * at_least:  # Nor would the tokens of all drafts be worth the time of more of them.
            break
        if own < limits[row]:
            heapq.heapreplace(worth, (value * alphas[row], row))
        else:
            heapq.heappop(worth)
    best = Counter(given[:num_best])
    return [best[row] for row in range(batch)], rate


def min_survival(passes: Sequence[float], tokens_per_second: float, batch: int) -> list[float]:
    """See ``DraftPlan.min_survival``. passes: the target's time for each further draft token of all rows."""
    return [max(0.0, tokens_per_second * seconds / batch) for seconds in passes]


@dataclass
class Speed:
    """Tokens a second of rounds that draft: of later ones more than of earlier ones."""

    tokens: float = 0.0
    seconds: float = 0.0
    rounds: float = 0.0
    expected_rounds: float = _EXPECTED_ROUNDS

    def add(self, tokens: int, seconds: float) -> None:
        """Count a round."""
        keep = 1 - 1 / _ROUNDS
        self.tokens = self.tokens * keep + tokens
        self.seconds = self.seconds * keep + seconds
        self.rounds = self.rounds * keep + 1
        self.expected_rounds *= keep

    def rate(self, expected: float) -> float:
        """Tokens a second. expected: before any round was counted."""
        if not self.rounds:
            return expected
        weight = self.expected_rounds * self.seconds / self.rounds
        return (self.tokens + expected * weight) / (self.seconds + weight)
