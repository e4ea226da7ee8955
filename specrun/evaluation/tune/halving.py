"""Successive halving (arXiv 1502.07943): measure all candidates, then the better half twice as long, and so on.

Every round takes about the same time, so the best ones get most of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

C = TypeVar("C")
M = TypeVar("M")


@dataclass(frozen=True)
class Trial(Generic[C, M]):
    """A candidate, and what the last round that measured it found."""

    candidate: C
    round: int
    """Round number, from 0."""
    measured: M


def halve(
    candidates: Sequence[C],
    measure: Callable[[C, int], M | None],
    score: Callable[[Trial[C, M]], float],
    time_is_over: Callable[[], bool],
) -> list[Trial[C, M]]:
    """The trials, best first: by their last round, then by score.

    measure: takes a candidate and a round's number. It gives None for a candidate that cannot be measured, which drops
    out. score: may learn from round to round. In a round the best of the last one come first, so that a round that is
    cut short has measured those.
    """
    trials: dict[C, Trial[C, M]] = {}
    left, number = list(candidates), 0
    while left:
        measured: list[Trial[C, M]] = []
        for candidate in left:
            if time_is_over():
                break
            if (measurement := measure(candidate, number)) is not None:
                trials[candidate] = Trial(candidate, number, measurement)
                measured.append(trials[candidate])
        if time_is_over() or len(measured) < 2:
            break
        measured.sort(key=score, reverse=True)
        left = [trial.candidate for trial in measured[: (len(measured) + 1) // 2]]
        number += 1
        if len(left) == 1:
            break
    return sorted(trials.values(), key=lambda trial: (trial.round, score(trial)), reverse=True)


def effort(number: int, batch_size: int, prompts: int) -> tuple[int, int]:
    """How many prompts a round decodes, how often: twice as many texts as the round before.

    batch_size: the largest one, of which every candidate gets a full batch. prompts: how many there are.
    """
    texts = batch_size << number
    return min(prompts, texts), max(1, texts // prompts)


def spread_out(items: Sequence[C], count: int) -> list[C]:
    """``count`` of the items, from the whole list."""
    return [items[n * len(items) // count] for n in range(count)]
