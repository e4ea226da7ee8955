"""How many tokens to draft: the number whose rounds yield the most tokens a second, found while decoding.

A round of draft length g takes T(g), which is measured, and yields 1 + alpha + .. + alpha^g tokens (arXiv 2211.17192)
for an acceptance rate alpha, which is measured too. Where 0 is best nothing is learnt about the draft, so it is tried
again from time to time; what the trials cost is kept to a small share of the time.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from specrun.stats import expected_tokens

TRIAL_SHARE = 0.01
"""Of the time, that trials of a draft that does not pay may take."""
MARGIN = 1.02
"""Drafting must promise this much more than plain rounds, whose time is known no better."""
_CLOSE, _PLAIN_EVERY = 1.25, 16
"""While it promises less than this, a plain round is timed anew every so many rounds."""
_NEEDED = 3
"""Plain rounds to be timed before anything is decided."""
_KEPT = 15
"""Latest times of a draft length that are kept."""
_LINE = 4
"""What the line through all lengths says of one counts as much as so many times of its own."""
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
class RoundTimes:
    """T(g) of one batch size: what a straight line through all lengths says of g, within the middle of what was seen.

    That is the median of the times seen and of ``_LINE`` times of the line's. So one that was seen seldom, and had bad
    luck, is not ruled out for good, and one that was seen often is known by its own times.
    Machines get faster and slower, and lengths are not seen at the same times: what is kept of a round is its time in
    relation to ``pace``, which rounds of all lengths tell.
    """

    seen: dict[int, deque[float]] = field(default_factory=dict)
    medians: dict[int, float] = field(default_factory=dict)
    pace: float = 1.0
    _paces: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _bounds: dict[int, tuple[float, float]] = field(default_factory=dict)
    """What the median of each length's times lies between when ``_LINE`` more of them, all equal, join those seen."""

    def add(self, draft_len: int, seconds: float) -> None:
        """Count a round."""
        if draft_len in self.medians:
            self._paces.append(seconds / self.medians[draft_len])
            self.pace = statistics.median(self._paces)
        times = self.seen.setdefault(draft_len, deque(maxlen=_KEPT))
        times.append(seconds / self.pace)
        ordered = sorted(times)
        self.medians[draft_len] = statistics.median(ordered)
        middle = (len(ordered) + _LINE) // 2
        reached = [0.0] * _LINE + ordered + [math.inf] * _LINE
        self._bounds[draft_len] = (reached[middle], reached[middle + _LINE])

    def seconds(self, most: int) -> list[float] | None:
        """T(0), .., T(most); None before some plain rounds and one with drafts were seen."""
        known = self.medians
        if len(known) < 2 or len(self.seen.get(0, ())) < _NEEDED:
            return None
        # Rounds get longer with g. A line from T(0); its slope the median, so that a slow round does not count.
        slope = max(0.0, statistics.median_low((t - known[0]) / g for g, t in known.items() if g))
        found = []
        for g in range(most + 1):
            lowest, highest = self._bounds.get(g, (0.0, math.inf))
            found.append(self.pace * min(max(known[0] + slope * g, lowest), highest))
        return found


_UNKNOWN = Acceptance()


class DraftLength:
    """Chooses g for every round. Owns what was learnt of the draft: for its decoder's life, and for each request.

    With a fixed length that is always the answer.
    """

    def __init__(self, most: int, fixed: int | None) -> None:
        self.most = most
        self.fixed = fixed
        self._times: dict[int, RoundTimes] = {}
        self._overall = Acceptance()
        self._elapsed = 0.0
        self._lost = 0.0
        """Seconds that drafting has cost beyond what it has saved."""
        self._own: WeakKeyDictionary[object, Acceptance] = WeakKeyDictionary()
        self._since_plain = 0
        self._reading: deque[float] = deque(maxlen=_KEPT)
        """Seconds a token that the draft took to read what it had missed."""
        self.drafting = bool(most) and fixed != 0
        """Whether drafting pays, as far as is known: then the draft reads prompts when the target does."""

    def choose(self, requests: Sequence[object], caps: Sequence[int], backlog: int = 0) -> int:
        """g for the next round of ``requests``; ``caps``: how many draft tokens each can use.

        backlog: tokens that the draft must read first, because it has rested.
        """
        if self.fixed is not None:
            return self.fixed
        times = self._times.setdefault(len(caps), RoundTimes())
        if min(self.most, max(caps)) == 0:
            return 0
        seconds = times.seconds(self.most)
        if seconds is None:
            # First rounds without drafts, which cost nothing; then a short one, since the draft may be slow.
            return 0 if len(times.seen.get(0, ())) < _NEEDED else 1
        prior = self._overall.rate(0.5, 2.0)
        alphas = [self._own.get(request, _UNKNOWN).rate(prior, _WEIGHT) for request in requests]
        step = seconds[1] - seconds[0]
        reading = backlog * (statistics.median(self._reading) if self._reading else _READING * step)
        # What the draft must read first has to pay before it rests again.
        plain, *drafting = token_rates(alphas, caps, [seconds[0], *(t + reading / _STRETCH for t in seconds[1:])])
        best = max(range(len(drafting)), key=drafting.__getitem__) + 1
        promise = drafting[best - 1] / plain
        self.drafting = promise >= MARGIN
        if not self.drafting:
            # After a plain round: without those between them, nothing would tell what trials cost.
            affordable = self._lost + step + reading <= TRIAL_SHARE * self._elapsed
            return int(affordable and self._since_plain == 0)
        if promise < _CLOSE and self._since_plain >= _PLAIN_EVERY:
            return 0
        return best

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
            plain = times.medians[0] * times.pace
            gained = sum(accepted for accepted, _ in rows) / len(rows)
            self._lost = max(0.0, self._lost + seconds - plain * (1 + gained))
        if not (draft_len and backlog):
            times.add(draft_len, seconds)
        elif usual := times.seconds(self.most):
            self._reading.append(max(0.0, seconds - usual[draft_len]) / backlog)
