"""Which part of a tensor becomes a part of the same tensor in another shape."""

from __future__ import annotations

import math
from collections.abc import Sequence

from specbuild.sharding.part import Part


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
    place = len(sizes) + part.axis
    if size is None and sizes[place] is None and place != len(held) + axis:
        return None  # The first axis may hold more than that.
    own = part.covered_by(factor, axis)
    return own, own.times(factor, part.axis)
