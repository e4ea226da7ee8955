"""How long rounds take: measured times of each draft length, and estimates for the others.

Machines get faster and slower while they run, and draft lengths are measured at different moments. So a round's time is
divided by the machine's pace at that moment.
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
    """The parameters. Shares and factors are of a round's time; counts are of rounds."""

    times_per_length: int = 63
    """How many of the latest times of a draft length are kept."""
    pace_rounds: int = 25
    """The pace is the median of so many latest rounds."""
    timed_rounds: int = 3
    """The noise of a draft length is measured once it has so many times."""
    initial_noise: float = 0.08
    """The noise before it is measured: how far the times of one draft length differ, as a share."""
    min_noise: float = 0.02
    interpolation_error: float = 0.15
    """How far the time of a draft length may lie from its estimate by the other lengths, as a share."""
    optimism: float = 0.4
    """An optimistic time is shorter by so many standard errors. So draft lengths are tried."""
    outlier_times: int = 2
    """So many first times of a draft length may be outliers."""
    outlier_factor: float = 1.5
    """A first time counts as at most this factor of its estimate, so that the draft length is tried again."""
    min_expected_share: float = 0.1
    """An extrapolated time is at least this share of the nearest measured one."""


@dataclass
class Pace:
    """How fast the machine is now, measured by the rounds of all draft lengths and batch sizes."""

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
        """Learn from a round that took ``ratio`` times the median of its draft length's ``num_known`` times."""
        self._latest.append(ratio)
        self.pace = statistics.median(self._latest)
        if num_known >= self.tuning.timed_rounds:
            self._distances.append(abs(math.log(ratio / self.pace)))
        if len(self._distances) >= self.tuning.pace_rounds:
            # The median distance of a normal distribution is 1 / 1.48 of its standard deviation.
            self.noise = max(self.tuning.min_noise, 1.48 * statistics.median(self._distances))


class Times(NamedTuple):
    """Estimated times of rounds of draft length 0, 1, .., in seconds, in relation to the pace."""

    expected: list[float]
    optimistic: list[float]


@dataclass
class RoundTimes:
    """The measured times of one batch size, in seconds, in relation to the pace."""

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
        """Estimate the times of draft lengths 0 to ``max_draft_len``.

        noise: see ``Pace.noise``. base: the expected times of another batch size; needed where nothing is measured.
        An expected time is a weighted mean of the length's own median and its estimate by the other lengths. The median
        weighs more if it has more times and less noise.
        """
        # The estimate by the other lengths weighs as much as this many measured times.
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
        """The time of ``draft_len`` that the other ``known`` lengths let expect, and how much shorter it may be.

        Between two lengths the time is interpolated on a straight line. Real times have steps, because a matrix product
        takes several rows at once. So the time may be shorter, as in a Brownian bridge: by nothing at the two lengths,
        and by half of their distance in the middle. Beyond all lengths the time follows the mean slope. With a
        ``base``, the distance from the base is interpolated instead.
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
