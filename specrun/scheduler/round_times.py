"""How long rounds take: what is expected before any ran, and what was measured since."""

from __future__ import annotations

import itertools
import math
import statistics
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from specrun.engine_dir.contract import FIRST_DRAFT_STEP_LEN
from specrun.engine_dir.pass_times import PassTimes


@dataclass(frozen=True)
class TimeTuning:
    """The parameters."""

    times_per_length: int = 255
    """Number of the latest times of a draft length that are kept."""
    latest_times: int = 31
    """Number of the latest times that are compared with the latest rounds of another kind: the speed of a shared
    machine's memory changes by a fifth within a minute."""
    line_rounds: float = 4.0
    """Number of measured times of a draft length that the line through all lengths counts as."""
    slope_rounds: float = 0.25
    """Number of measured times that the expected slope of that line counts as."""
    outlier_times: int = 2
    """Number of first times of a draft length that may be outliers."""
    outlier_factor: float = 1.5
    """Limit of so few times, as a factor of the line, so that their draft length is tried again."""
    optimism: float = 0.06
    """Share of the time by which an optimistic time of a length that has not been measured is shorter."""


class ExpectedTimes(NamedTuple):
    """What rounds are expected to take before any ran, in seconds."""

    rounds: Sequence[float]
    """Seconds of a round with draft length 0, 1, .."""
    draft_step: float = 0.0
    """The part of it that each further draft step takes."""

    @property
    def passes(self) -> list[float]:
        """The target's part of each further draft token of all rows."""
        return [later - sooner - self.draft_step for sooner, later in itertools.pairwise(self.rounds)]


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


_FLATTEST = 0.01
"""Share of T(0) by which the longest round is expected to take longer, at the least."""


@dataclass
class RoundTimes:
    """The measured times of rounds of one batch size, in seconds."""

    tuning: TimeTuning
    measured: dict[int, deque[float]] = field(default_factory=dict)
    """The latest measured times in seconds, by draft length."""
    medians: dict[int, float] = field(default_factory=dict)
    _sorted: dict[int, list[float]] = field(default_factory=dict)
    """Times of ``measured`` in order, so that no round sorts them."""

    def count(self, draft_len: int) -> int:
        """How many times of ``draft_len`` are kept."""
        return len(self.measured.get(draft_len, ()))

    def add(self, draft_len: int, seconds: float) -> None:
        """Add a round's time."""
        times, ordered = self.measured.setdefault(draft_len, deque()), self._sorted.setdefault(draft_len, [])
        times.append(seconds)
        insort(ordered, seconds)
        if len(times) > self.tuning.times_per_length:
            del ordered[bisect_left(ordered, times.popleft())]
        self.medians[draft_len] = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2

    def latest(self, draft_len: int, expected: float) -> float:
        """The median of the latest times of ``draft_len``; ``expected`` where none was measured."""
        times = self.measured.get(draft_len, ())
        return statistics.median(itertools.islice(reversed(times), self.tuning.latest_times)) if times else expected

    def optimistic(self, expected: Sequence[float]) -> list[float]:
        """The times that ``estimate`` gives, shorter where a length was measured rarely, so that it is tried."""
        optimism = self.tuning.optimism
        return [time * (1 - optimism / math.sqrt(self.count(g) + 1)) for g, time in enumerate(expected)]

    def estimate(self, prior: Sequence[float]) -> list[float]:
        """The expected times of draft lengths 0 to g, in seconds.

        prior: expected before any was measured, [g + 1], two or more. A time is a weighted mean of the length's own
        median, which single slow rounds do not move, and of the line through all lengths. The median weighs more the
        more times it has.
        """
        tuning, times = self.tuning, []
        scale, slope = self._line(prior) if self.medians else (1.0, 0.0)
        for draft_len, usual in enumerate(prior):
            expected, count = scale * usual + slope * draft_len, self.count(draft_len)
            if count:
                median = self.medians[draft_len]
                if count <= tuning.outlier_times:
                    median = min(median, tuning.outlier_factor * expected)
                expected = (count * median + tuning.line_rounds * expected) / (count + tuning.line_rounds)
            times.append(expected)
        return times

    def _line(self, prior: Sequence[float]) -> tuple[float, float]:
        """The scale a and the slope b of a * prior + b * draft_len that fit the medians best.

        Weighted least squares of relative errors. That b is 0 counts as ``slope_rounds`` measured times, and times do
        not fall with the length.
        """
        pp = pg = gg = pt = gt = 0.0
        for draft_len, median in self.medians.items():
            weight, usual = self.count(draft_len) / median**2, prior[draft_len]
            pp += weight * usual * usual
            pg += weight * usual * draft_len
            gg += weight * draft_len * draft_len
            pt += weight * usual * median
            gt += weight * draft_len * median
        usual_slope = pt / pp * max(prior[-1] - prior[0], _FLATTEST * prior[0]) / (len(prior) - 1)
        gg += self.tuning.slope_rounds / usual_slope**2
        slope = (pp * gt - pg * pt) / (pp * gg - pg * pg)
        slope = max(slope, -usual_slope)
        return (pt - slope * pg) / pp, slope


@dataclass
class PostDraftSlowdown:
    """How much longer a plain round takes behind one that drafted than behind plain ones.

    A draft displaces the target's weights from the processor's caches. Where these hold quantized weights, the next
    step takes up to a quarter longer, and the ones behind it less and less.
    """

    ROUNDS: ClassVar[int] = 8
    """Plain rounds in a row that tell it. The later half of them is settled."""
    in_row: int = ROUNDS
    """Plain rounds since the last one that drafted. None has drafted yet."""
    ratios: deque[float] = field(default_factory=lambda: deque([1.0], 15))
    """Time of settled rounds over that of the first one, for each of the latest runs. At first 1 is expected."""
    _run: list[float | None] = field(default_factory=list)

    def settled(self, drafted: bool, seconds: float | None) -> float | None:
        """What a round that took ``seconds`` would take among rounds of its kind. None: it does not tell."""
        if drafted:
            self.in_row, self._run = 0, []
            return seconds
        self.in_row += 1
        if self.in_row > self.ROUNDS:
            return seconds
        self._run.append(seconds)
        half = self.ROUNDS // 2
        if self.in_row == self.ROUNDS and (first := self._run[0]) and (later := [*filter(None, self._run[half:])]):
            self.ratios.append(statistics.median(later) / first)
        if seconds is None or 1 < self.in_row <= half:
            return None
        return seconds * statistics.median(self.ratios) if self.in_row == 1 else seconds
