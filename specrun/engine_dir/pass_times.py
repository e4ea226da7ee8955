"""How long an engine's passes take, measured before the first round: what ``auto`` expects of rounds."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class PassTimes(BaseModel):
    """Seconds of passes of so many rows and so many tokens of a row."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rows: tuple[int, ...] = Field(min_length=1)
    """[R], rising."""
    tokens: tuple[int, ...] = Field(min_length=1)
    """[T], rising."""
    seconds: tuple[tuple[float, ...], ...]
    """[R, T]"""
    processor: str = ""
    """The processor and the runtime that they were measured with; empty for those of whole rounds on a GPU."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for sizes in (self.rows, self.tokens):
            if sizes[0] < 1 or any(later <= earlier for earlier, later in itertools.pairwise(sizes)):
                raise ValueError(f"sizes {list(sizes)}: expected rising numbers from 1 on")
        if [len(row) for row in self.seconds] != [len(self.tokens)] * len(self.rows):
            raise ValueError(f"expected {len(self.rows)} rows of {len(self.tokens)} times")
        if not all(0 < time < float("inf") for row in self.seconds for time in row):
            raise ValueError("expected times above 0")
        return self

    def of(self, rows: int, tokens: int) -> float:
        """Seconds of a pass, on straight lines between the nearest sizes that were measured."""
        return between(self.rows, [between(self.tokens, times, tokens) for times in self.seconds], rows)


class PairTimes(NamedTuple):
    """Those of a target, and of the draft engine where there is one."""

    target: PassTimes
    draft: PassTimes | None


def between(sizes: Sequence[int], values: Sequence[float], size: float) -> float:
    """The value at ``size``; beyond the outermost sizes, on the line through the nearest two."""
    if len(sizes) == 1:
        return values[0]
    right = min(max(bisect_right(sizes, size), 1), len(sizes) - 1)
    share = (size - sizes[right - 1]) / (sizes[right] - sizes[right - 1])
    return values[right - 1] + share * (values[right] - values[right - 1])
