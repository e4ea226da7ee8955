"""How long rounds take: what is expected before any ran, and what was measured since."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from specrun.engine_dir.contract import FIRST_DRAFT_STEP_LEN
from specrun.engine_dir.pass_times import PassTimes, between

_WINDOW = 256
"""Rounds after which older ones have lost most of their weight, so that a length of bad luck is tried again."""
_EXPECTED_ROUNDS = 2.0
"""Rounds that the expected time of a draft length counts as."""
_SLOPE_ROUNDS = 0.25
"""Rounds that the expected time of a draft token counts as."""
_OUTLIER = 1.5
"""Limit of a round's time, in expected ones."""
_OPTIMISM = 0.06
"""Share of its time by which a length that was never tried counts as shorter."""
_FLATTEST = 0.01
"""Share of T(0) by which the longest round is expected to take longer, at the least."""


class ExpectedTimes(NamedTuple):
    """What rounds are expected to take before any ran."""

    rounds: Sequence[float]
    """[g + 1]: seconds of a round with 0, 1, .. g draft tokens a row, or multiples of them."""
    draft_step: float = 0.0
    """The part of it that each further draft step takes."""

    def without_steps(self) -> ExpectedTimes:
        """What rounds take whose drafts cost no step."""
        return ExpectedTimes([seconds - g * self.draft_step for g, seconds in enumerate(self.rounds)])


def expected_by_passes(target: PassTimes, draft: PassTimes | None, rows: int, max_draft_len: int) -> ExpectedTimes:
    """Seconds of rounds of draft length 0 to ``max_draft_len`` that follow from the times of passes.

    A round verifies g + 1 tokens. A draft model's first step reads two, its others one. draft None: drafts take no
    time.
    """
    times = [target.of(rows, draft_len + 1) for draft_len in range(max_draft_len + 1)]
    if draft is None:
        return ExpectedTimes(times)
    first, further = draft.of(rows, FIRST_DRAFT_STEP_LEN), draft.of(rows, 1)
    return ExpectedTimes([time + (first + (g - 1) * further if g else 0.0) for g, time in enumerate(times)], further)


class RoundTimes:
    """The times of rounds of one batch size: T(0), T(1), .. T(g), two or more."""

    def __init__(self, expected: ExpectedTimes) -> None:
        self.expected = expected
        self.counts = [0.0] * len(expected.rounds)
        """Measured rounds of each draft length. Older ones count less."""
        self._means = [0.0] * len(expected.rounds)
        """Their mean time in seconds."""
        self.seconds: Sequence[float] = expected.rounds
        """[g + 1]: seconds of rounds with 0, 1, .. draft tokens, by all that is known."""

    def add(self, draft_len: float, seconds: float) -> None:
        """Count a round in which rows had ``draft_len`` draft tokens on average."""
        times = self.seconds
        nearest = max(1, round(draft_len)) if draft_len else 0
        seconds *= times[nearest] / between(range(len(times)), times, draft_len)
        if any(self.counts):
            seconds = min(seconds, _OUTLIER * times[nearest])
        # Plain rounds, of which there may be thousands, say nothing new of those that draft.
        for index in range(len(times) if draft_len else 1):
            self.counts[index] *= 1 - 1 / _WINDOW
        self.counts[nearest] += 1
        self._means[nearest] += (seconds - self._means[nearest]) / self.counts[nearest]
        self.seconds = self._estimate()

    def optimistic(self) -> list[float]:
        """``seconds``, less for the lengths that were rarely tried, so that they are tried."""
        counts = enumerate(self.counts)
        return [self.seconds[g] * (1 - _OPTIMISM / math.sqrt(count + 1)) for g, count in counts]

    def _estimate(self) -> list[float]:
        """Means of what was measured of each length and of the line of all."""
        scale, slope = self._line()
        return [
            (count * mean + _EXPECTED_ROUNDS * (scale * usual + slope * g)) / (count + _EXPECTED_ROUNDS)
            for g, (usual, count, mean) in enumerate(zip(self.expected.rounds, self.counts, self._means, strict=True))
        ]

    def expected_now(self) -> ExpectedTimes:
        """What was expected, at the pace of T(0)."""
        pace = self.seconds[0] / self.expected.rounds[0]
        return ExpectedTimes([pace * seconds for seconds in self.expected.rounds], pace * self.expected.draft_step)

    def _line(self) -> tuple[float, float]:
        """The scale a and the slope b of a * expected + b * draft_len that fit what was measured best.

        Weighted least squares of relative errors. That b is 0 counts as ``_SLOPE_ROUNDS``, and times do not fall with
        the length.
        """
        pp = pg = gg = pt = gt = 0.0
        for g, (usual, count, mean) in enumerate(zip(self.expected.rounds, self.counts, self._means, strict=True)):
            if count:
                weight = count / mean**2
                pp += weight * usual * usual
                pg += weight * usual * g
                gg += weight * g * g
                pt += weight * usual * mean
                gt += weight * g * mean
        if not pp:
            return 1.0, 0.0
        first, *_, last = self.expected.rounds
        usual_slope = pt / pp * max(last - first, _FLATTEST * first) / (len(self.counts) - 1)
        gg += _SLOPE_ROUNDS / usual_slope**2
        slope = max((pp * gt - pg * pt) / (pp * gg - pg * pg), -usual_slope)
        return (pt - slope * pg) / pp, slope
