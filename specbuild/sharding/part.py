"""What a rank has of an axis."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise


class MisalignedError(Exception):
    """An axis cannot be cut there, but at multiples of ``1 / parts`` of it."""

    def __init__(self, parts: int) -> None:
        super().__init__(f"cut at multiples of 1/{parts}")
        self.parts = parts


@dataclass(frozen=True)
class Part:
    """The parts of one axis that the ranks have."""

    axis: int
    """Number of the axis, counted from the end: -1 is the last one."""
    size: int
    """Size of the whole axis."""
    ranges: tuple[tuple[int, int], ...]
    """Range of each rank: first index, and the index after the last. Two ranks may have the same range."""

    def at(self, axis: int) -> Part:
        """The same of another axis."""
        return replace(self, axis=axis)

    def shifted(self, start: int, size: int) -> Part:
        """Of an axis of ``size``, in which this one begins at ``start``."""
        return replace(self, size=size, ranges=tuple((first + start, last + start) for first, last in self.ranges))

    def times(self, factor: int, axis: int) -> Part:
        """Of an axis that has ``factor`` elements for each of this one."""
        ranges = tuple((first * factor, last * factor) for first, last in self.ranges)
        return Part(axis, self.size * factor, ranges)

    def divided(self, factor: int, axis: int) -> Part:
        """Of an axis that has one element for ``factor`` of this one's. Raises MisalignedError."""
        if any(bound % factor for own in self.ranges for bound in own):
            raise MisalignedError(self.size // factor)
        return Part(axis, self.size // factor, tuple((first // factor, last // factor) for first, last in self.ranges))

    def covered_by(self, factor: int, axis: int) -> Part:
        """As ``divided``, or the element that holds each rank's range where it is a part of one. MisalignedError."""
        if all(first // factor == (last - 1) // factor for first, last in self.ranges):
            ranges = tuple((first // factor, first // factor + 1) for first, _ in self.ranges)
            return Part(axis, self.size // factor, ranges)
        return self.divided(factor, axis)


def divide(axis: int, size: int, parts: int, ranks: int) -> Part | None:
    """An axis of ``size`` between ``ranks``, at multiples of ``1 / parts`` of it, as evenly as possible.

    None where there are fewer parts than ranks.
    """
    if parts < ranks:
        return None
    bounds = [rank * parts // ranks * (size // parts) for rank in range(ranks + 1)]
    return Part(axis, size, tuple(pairwise(bounds)))


def padded(axis: int, size: int, ranks: int) -> Part:
    """An axis between ``ranks`` in equal parts, of which the last ones may reach behind its end."""
    each = -(-size // ranks)
    return Part(axis, size, tuple((rank * each, rank * each + each) for rank in range(ranks)))
