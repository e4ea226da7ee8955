"""How many tokens to draft: the number whose rounds yield the most tokens a second, found while decoding.

A round of draft length g takes T(g), which is measured, and yields 1 + alpha + .. + alpha^g tokens (arXiv 2211.17192)
for an acceptance rate alpha, which is measured too. Of the lengths that pay, the one is taken whose rate could be the
best, given how well its time is known: so a length that nobody has tried is tried where it might be better, once or
twice. (Times are no straight lines: a processor's matrix products take so many rows at a time.)
Where 0 is best nothing is learnt about the draft, so it is tried again from time to time; what the trials cost is kept
to a small share of the time.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import WeakKeyDictionary

from specrun.stats import expected_tokens

TRIAL_SHARE = 0.01
"""Of the time, that trials of a draft that does not pay may take."""
MARGIN = 1.02
"""Drafting must promise this much more than plain rounds, whose time is known no better."""
_CLOSE, _PLAIN_EVERY = 1.25, 16
"""While it promises less than this, a plain round is timed anew every so many rounds."""
_NEEDED = 3
"""Plain rounds to be timed before anything is decided, where no other batch size tells."""
_PLAIN_AFTER = 4
"""Rounds of a new batch size before its first plain one, where another batch size has told that drafting pays."""
_KEPT = 63
"""Latest times of a draft length that are kept."""
_RECENT = 25
"""Latest rounds that tell the pace."""
_STRANGE = 0.15
"""How far, as a share, a length's time may lie from what the others let expect."""
_HOPE = 0.4
"""So many standard errors shorter than it is thought, a round is taken for when lengths are compared."""
_NOISE, _LEAST_NOISE = 0.08, 0.02
"""How far times of one length differ, as a share: until it was seen, and at least."""
_FEW, _BAD_LUCK = 2, 1.5
"""The first times of a length count as at most this much more than the others let expect."""
_WEIGHT = 4.0
"""Evaluated tokens of its own that a request needs to count as much as the requests before it."""
_READING = 0.25
"""Of a draft step, that reading one of many tokens takes; until it was seen."""
_STRETCH = 64
"""Rounds with drafts in a row that are expected, when what it takes to begin is weighed."""
_WINDOW = 300.0
"""Seconds of decoding after which what was lost, and what it may be a share of, have lost most of their weight."""
_MEMORY = 128.0
"""Evaluated tokens after which old ones have lost most of their weight."""


def token_rates(alphas: Sequence[float], caps: Sequence[int], seconds: Sequence[float]) -> list[float]:
    """Tokens a second of a batch for every g from 0 to what its rows can use.

    alphas, caps: each row's acceptance rate and the most draft tokens it can use; seconds[g]: a round's time.
    """
    lengths = range(min(len(seconds) - 1, max(caps, default=0)) + 1)
    rows = list(zip(alphas, caps, strict=True))
    return [sum(expected_tokens(alpha, min(g, cap)) for alpha, cap in rows) / seconds[g] for g in lengths]


@dataclass
class Acceptance:
    """A running acceptance rate: old tokens lose weight as new ones come."""

    accepted: float = 0.0
    evaluated: float = 0.0

    def add(self, accepted: int, evaluated: int) -> None:
        """Count a round."""
        keep = 1 - min(1.0, evaluated / _MEMORY)
        self.accepted = self.accepted * keep + accepted
        self.evaluated = self.evaluated * keep + evaluated

    def rate(self, prior: float, weight: float) -> float:
        """The rate; ``prior`` counts as much as ``weight`` evaluated tokens."""
        return (self.accepted + prior * weight) / (self.evaluated + weight)


@dataclass
class Pace:
    """How fast the machine is now, in relation to what is kept: machines get faster and slower.

    Lengths are not seen at the same times, so what is kept of a round is its time in relation to the pace, which
    rounds of all lengths and batch sizes tell.
    """

    pace: float = 1.0
    noise: float = _NOISE
    """How far times of one length differ from their median, as a share of it: one standard deviation."""
    _latest: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    _distances: deque[float] = field(default_factory=lambda: deque(maxlen=64))

    def see(self, ratio: float, known: int) -> None:
        """A round took ``ratio`` times the median of the ``known`` times of its length."""
        self._latest.append(ratio)
        self.pace = statistics.median(self._latest)
        if known >= _NEEDED:
            self._distances.append(abs(math.log(ratio / self.pace)))
        if (
            len(self._distances) >= _RECENT
        ):  # Of a normal distribution the median distance is 1 / 1.48 of its deviation.
            self.noise = max(_LEAST_NOISE, 1.48 * statistics.median(self._distances))


class Times(NamedTuple):
    """T(0), T(1), .., in relation to the pace: what is thought of them, and at the best."""

    likely: list[float]
    hoped: list[float]


@dataclass
class RoundTimes:
    """What was seen of the times of one batch size, in relation to the pace."""

    seen: dict[int, deque[float]] = field(default_factory=dict)
    medians: dict[int, float] = field(default_factory=dict)

    def add(self, draft_len: int, seconds: float, pace: Pace) -> None:
        """Count a round."""
        if draft_len in self.medians:
            pace.see(seconds / self.medians[draft_len], len(self.seen[draft_len]))
        times, time = self.seen.setdefault(draft_len, deque(maxlen=_KEPT)), seconds / pace.pace
        if len(times) < _FEW and len(self.medians.keys() - {draft_len}) > 1:
            # One that had bad luck would not be tried again.
            time = min(time, _BAD_LUCK * self._expected(draft_len, sorted(self.medians), None)[0])
        times.append(time)
        self.medians[draft_len] = statistics.median(times)

    def times(self, most: int, noise: float, base: Sequence[float] | None = None) -> Times:
        """T(0), .., T(most), where something was seen or there is a ``base``: the times of another batch size.

        A length's own median counts the more the oftener it was seen and the less noise there is; the rest is what
        the others let expect.
        """
        others = noise**2 / _STRANGE**2  # Times of its own that what others say is worth.
        known = sorted(self.medians)
        likely: list[float] = []
        hoped: list[float] = []
        for g in range(most + 1):
            expected, step = self._expected(g, known, base)
            count = 0
            if g in self.medians:
                count, step = len(self.seen[g]), 0.0
                time = (count * self.medians[g] + others * expected) / (count + others)
            else:
                time = expected
            likely.append(time)
            hoped.append(time - max(_HOPE * _STRANGE * math.sqrt(others / (count + others)) * time, step))
        return Times(likely, hoped)

    def _expected(self, g: int, known: Sequence[int], base: Sequence[float] | None) -> tuple[float, float]:
        """What the ``known`` lengths but ``g`` let expect of T(g), and how much less it may be if there is a step.

        Between two lengths that is a straight line, and as far as a Brownian bridge goes: nothing at its ends, half of
        the distance between them in its middle. Beyond all of them it is the mean slope. With a ``base``, the distance
        from that is what is expected to be alike.
        """
        medians, left, right = self.medians, bisect.bisect_left(known, g) - 1, bisect.bisect_right(known, g)
        if left < 0 and right == len(known):
            return (base[g] if base else medians[g]), 0.0
        if left < 0 or right == len(known):
            nearest, first, last = (
                (known[right], known[right], known[-1]) if left < 0 else (known[left], known[0], known[left])
            )
            time, step = medians[nearest], 0.0
            if base:
                time += base[g] - base[nearest]
            elif last > first:
                time += max(0.0, (medians[last] - medians[first]) / (last - first)) * (g - nearest)
        else:
            before, after = known[left], known[right]
            share = (g - before) / (after - before)
            time = medians[before] * (1 - share) + medians[after] * share
            step = max(0.0, medians[after] - medians[before]) * math.sqrt(share * (1 - share))
            if base:
                time += base[g] - base[before] * (1 - share) - base[after] * share
        return max(time, 0.1 * medians[known[0] if left >= 0 else known[right]]), step


_UNKNOWN = Acceptance()


class DraftLength:
    """Chooses g for every round. Owns what was learnt of the draft: for its decoder's life, and for each request.

    With a fixed length that is always the answer.
    """

    def __init__(self, most: int, fixed: int | None) -> None:
        self.most = most
        self.fixed = fixed
        self._pace = Pace()
        self._times: dict[int, RoundTimes] = {}
        """By batch size."""
        self._overall = Acceptance()
        self._elapsed = 0.0
        self._lost = 0.0
        """Seconds that drafting has cost beyond what it has saved."""
        self._own: WeakKeyDictionary[object, Acceptance] = WeakKeyDictionary()
        self._since_plain = 0
        self._reading: deque[float] = deque(maxlen=_KEPT)
        """What a token took that the draft read because it had missed it, in relation to the pace."""
        self.drafting = bool(most) and fixed != 0
        """Whether drafting pays, as far as is known: then the draft reads prompts when the target does."""

    def choose(self, requests: Sequence[object], caps: Sequence[int], backlog: int = 0) -> int:
        """g for the next round of ``requests``; ``caps``: how many draft tokens each can use.

        backlog: tokens that the draft must read first, because it has rested.
        """
        if self.fixed is not None:
            return self.fixed
        if min(self.most, max(caps)) == 0:
            return 0
        seen, base = self._times.setdefault(len(caps), RoundTimes()), self._base(len(caps))
        if base is None and len(seen.seen.get(0, ())) < _NEEDED:
            return 0  # First rounds without drafts, which cost nothing;
        if base is None and len(seen.medians) < 2:
            return 1  # then a short one, since the draft may be slow.
        times = seen.times(self.most, self._pace.noise, base)
        prior = self._overall.rate(0.5, 2.0)
        alphas = [self._own.get(request, _UNKNOWN).rate(prior, _WEIGHT) for request in requests]
        step = times.likely[1] - times.likely[0]
        reading = backlog * (statistics.median(self._reading) if self._reading else _READING * step)
        plain_rounds, known_rounds = len(seen.seen.get(0, ())), sum(map(len, seen.seen.values()))

        def rates(seconds: Sequence[float]) -> list[float]:
            # What the draft must read first has to pay before it rests again.
            return token_rates(alphas, caps, [seconds[0], *(t + reading / _STRETCH for t in seconds[1:])])

        plain, *drafting = rates(times.likely)
        promise = max(drafting) / plain
        self.drafting = promise >= MARGIN
        if not self.drafting:
            # The next longer length than any tried may take no longer than that.
            longest = max([1, *(g for g in seen.medians if g <= len(drafting))])
            upto = min(longest + 1, len(drafting))
            floor = [times.likely[min(g, longest)] for g in range(upto + 1)]
            trial = max(range(1, upto + 1), key=rates(floor).__getitem__)
            cost = times.likely[trial] - times.likely[0] + reading
            # After a plain round: without those between them, nothing would tell what trials cost.
            affordable = self._lost + cost * self._pace.pace <= TRIAL_SHARE * self._elapsed
            return trial if affordable and self._since_plain == 0 else 0
        unknown = plain_rounds == 0 and known_rounds >= _PLAIN_AFTER
        if unknown or (promise < _CLOSE and self._since_plain >= _PLAIN_EVERY):
            return 0
        hoped = rates(times.hoped)[1:]
        return max(range(len(hoped)), key=hoped.__getitem__) + 1

    def _base(self, batch_size: int) -> list[float] | None:
        """The times of the nearest other batch size of which enough is known."""
        known = [size for size, times in self._times.items() if size != batch_size and len(times.medians) > 1]
        known = [size for size in known if 0 in self._times[size].medians]
        if not known:
            return None
        nearest = min(known, key=lambda size: max(size, batch_size) / min(size, batch_size))
        return self._times[nearest].times(self.most, self._pace.noise).likely

    def observe(
        self,
        draft_len: int,
        seconds: float | None,
        requests: Sequence[object],
        rows: Sequence[tuple[int, int]],
        backlog: int = 0,
    ) -> None:
        """Learn from a round: its time, and the (accepted, evaluated) draft tokens of each of ``requests``.

        seconds: None where it was prepared for later ones, and says nothing of their time.
        """
        if self.fixed is not None:
            return
        self._since_plain = self._since_plain + 1 if draft_len else 0
        for request, (accepted, evaluated) in zip(requests, rows, strict=True):
            self._own.setdefault(request, Acceptance()).add(accepted, evaluated)
            self._overall.add(accepted, evaluated)
        if seconds is None:
            return
        times = self._times.setdefault(len(rows), RoundTimes())
        keep = math.exp(-seconds / _WINDOW)
        self._elapsed = self._elapsed * keep + seconds
        self._lost *= keep
        if draft_len and 0 in times.medians:
            plain = times.medians[0] * self._pace.pace
            gained = sum(accepted for accepted, _ in rows) / len(rows)
            self._lost = max(0.0, self._lost + seconds - plain * (1 + gained))
        if not (draft_len and backlog):
            times.add(draft_len, seconds, self._pace)
        elif len(times.medians) > 1:
            usual = times.times(self.most, self._pace.noise).likely[draft_len]
            self._reading.append(max(0.0, seconds / self._pace.pace - usual) / backlog)
