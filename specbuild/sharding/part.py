"""What a rank has of an axis, and what that becomes in another shape of the same tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
        if any(bound % factor for bounds in self.ranges for bound in bounds):
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


def source_of(part: Part, sizes: Sequence[int | None], held: Sequence[int | None]) -> tuple[Part, Part] | None:
    """The part of the input that is needed, and what it becomes: ``part``, or more. None: it has no axis of its own.

    sizes, held: the shapes of output and input; None where a size depends on the pass. Raises MisalignedError.
    """
    same = 0  # Axes at the end that stay as they are.
    while same < min(-part.axis - 1, len(held)) and sizes[-1 - same] == held[-1 - same]:
        same += 1
    inner = [size or 0 for size in sizes[len(sizes) + part.axis + 1 : len(sizes) - same]]
    if not all(inner):
        return None
    behind, covered, axis = math.prod(inner), 1, -1 - same
    while -axis <= len(held) and (size := held[axis]) and covered * size <= behind:
        axis, covered = axis - 1, covered * size
    if -axis > len(held):
        return None
    size = held[axis]
    if covered < behind:  # The axis is the outer part of a larger one.
        is_outer = not behind % covered and (size is None or size * covered == part.size * behind)
        return (part.times(behind // covered, axis), part) if is_outer else None
    if size == part.size:
        return part.at(axis), part
    return None if size is not None and size > part.size else _merged(part, sizes, held, axis)


def _merged(part: Part, sizes: Sequence[int | None], held: Sequence[int | None], axis: int) -> tuple[Part, Part] | None:
    """Of an axis that is merged of several, the last of which is ``axis``. The first of them is cut."""
    factor, size = 1, held[axis]
    while size is not None and factor * size < part.size:
        factor, axis = factor * size, axis - 1
        if -axis > len(held):
            return None
        size = held[axis]
    if part.size % factor or (size is not None and size * factor != part.size):
        return None
    index = len(sizes) + part.axis
    if size is None and sizes[index] is None and index != len(held) + axis:
        return None  # The first axis may hold more than that.
    covered = part.covered_by(factor, axis)
    return covered, covered.times(factor, part.axis)
