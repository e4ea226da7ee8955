"""How long rounds take: what was measured of each draft length, and what that lets expect of the others.

Machines get faster and slower while they run, and draft lengths are not measured at the same moments. So a round's time
is kept in relation to the machine's pace at that moment.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass(frozen=True)
class TimeTuning:
    """Numbers of this module. Shares and factors are of a round's time; counts are of rounds."""

    times_per_length: int = 63
    """Latest times that are kept of a draft length."""
    pace_rounds: int = 25
    """Latest rounds whose median is the pace."""
    timed_rounds: int = 3
    """Times of a draft length from which on its noise is measured."""
    initial_noise: float = 0.08
    """How far times of one length differ, as a share, until it was measured."""
    min_noise: float = 0.02
    interpolation_error: float = 0.15
    """How far, as a share, a length's time may lie from what the other lengths let expect."""
    optimism: float = 0.4
    """By how many standard errors a time is taken for shorter when lengths are compared. So lengths get tried."""
    outlier_times: int = 2
    """The first times of a length that may be outliers."""
    outlier_factor: float = 1.5
    """An outlier counts as at most this factor of what the others let expect, so that the length is tried again."""
    min_expected_share: float = 0.1
    """An extrapolated time is at least this share of the nearest measured one."""


@dataclass
class Pace:
    """How fast the machine is now. Rounds of all draft lengths and batch sizes tell."""

    tuning: TimeTuning
    pace: float = 1.0
    """A round's time now, as a factor of its median."""
    noise: float = field(init=False)
    """How far times of one length differ from their median, as a share of it: one standard deviation."""
    _latest: deque[float] = field(init=False)
    _distances: deque[float] = field(default_factory=lambda: deque(maxlen=64))

    def __post_init__(self) -> None:
        self.noise = self.tuning.initial_noise
        self._latest = deque(maxlen=self.tuning.pace_rounds)

    def add(self, ratio: float, num_known: int) -> None:
        """A round took ``ratio`` times the median of the ``num_known`` times of its length."""
        self._latest.append(ratio)
        self.pace = statistics.median(self._latest)
        if num_known >= self.tuning.timed_rounds:
            self._distances.append(abs(math.log(ratio / self.pace)))
        if len(self._distances) >= self.tuning.pace_rounds:
            # The median distance of a normal distribution is 1 / 1.48 of its standard deviation.
            self.noise = max(self.tuning.min_noise, 1.48 * statistics.median(self._distances))


class Times(NamedTuple):
    """Times of rounds of draft length 0, 1, .., in relation to the pace."""

    expected: list[float]
    optimistic: list[float]


@dataclass
class RoundTimes:
    """The times of one batch size, in relation to the pace."""

    tuning: TimeTuning
    measured: dict[int, deque[float]] = field(default_factory=dict)
    """By draft length."""
    medians: dict[int, float] = field(default_factory=dict)

    def count(self, draft_len: int) -> int:
        """How many times of ``draft_len`` are kept."""
        return len(self.measured.get(draft_len, ()))

    def add(self, draft_len: int, seconds: float, pace: Pace) -> None:
        """Add a round's time."""
        if draft_len in self.medians:
            pace.add(seconds / self.medians[draft_len], len(self.measured[draft_len]))
        times = self.measured.setdefault(draft_len, deque(maxlen=self.tuning.times_per_length))
        time = seconds / pace.pace
        if len(times) < self.tuning.outlier_times and len(self.medians.keys() - {draft_len}) > 1:
            expected, _ = self._expect(draft_len, sorted(self.medians), None)
            time = min(time, self.tuning.outlier_factor * expected)
        times.append(time)
        self.medians[draft_len] = statistics.median(times)

    def estimate(self, max_draft_len: int, noise: float, base: Sequence[float] | None = None) -> Times:
        """Times of draft lengths 0 to ``max_draft_len``. Something must be measured, or ``base`` given.

        base: the expected times of another batch size. A length's own median counts the more the oftener it was
        measured and the less noise there is; the rest is what the other lengths let expect.
        """
        # What the other lengths let expect is worth this many measured times.
        prior = noise**2 / self.tuning.interpolation_error**2
        known = sorted(self.medians)
        optimism = self.tuning.optimism * self.tuning.interpolation_error * math.sqrt(prior)
        times = Times([], [])
        for draft_len in range(max_draft_len + 1):
            expected, step = self._expect(draft_len, known, base)
            count = 0
            if median := self.medians.get(draft_len):
                count = len(self.measured[draft_len])
                expected = (count * median + prior * expected) / (count + prior)
                step = 0.0
            times.expected.append(expected)
            times.optimistic.append(expected - max(optimism / math.sqrt(count + prior) * expected, step))
        return times

    def _expect(self, draft_len: int, known: Sequence[int], base: Sequence[float] | None) -> tuple[float, float]:
        """What the ``known`` lengths but ``draft_len`` let expect of its time, and how much shorter it may be.

        Between two lengths the expected time is on the straight line. (Times have steps, since a matrix product takes
        so many rows at a time; so it may be shorter by what a Brownian bridge allows: nothing at the two lengths, half
        of their distance in the middle.) Beyond all of them it follows the mean slope. With a ``base``, the
        distance from the base is interpolated.
        """
        medians = self.medians
        left, right = bisect.bisect_left(known, draft_len) - 1, bisect.bisect_right(known, draft_len)
        if left < 0 and right == len(known):
            return (base[draft_len] if base else medians[draft_len]), 0.0
        if left < 0 or right == len(known):
            nearest, first, last = (
                (known[right], known[right], known[-1]) if left < 0 else (known[left], known[0], known[left])
            )
            time, step = medians[nearest], 0.0
            if base:
                time += base[draft_len] - base[nearest]
            elif last > first:
                time += max(0.0, (medians[last] - medians[first]) / (last - first)) * (draft_len - nearest)
        else:
            before, after = known[left], known[right]
            share = (draft_len - before) / (after - before)
            time = medians[before] * (1 - share) + medians[after] * share
            step = max(0.0, medians[after] - medians[before]) * math.sqrt(share * (1 - share))
            if base:
                time += base[draft_len] - base[before] * (1 - share) - base[after] * share
        return max(time, self.tuning.min_expected_share * medians[known[0] if left >= 0 else known[right]]), step
