"""Successive halving: the better half goes on, rounds take about the same time, and a time limit ends it."""

from __future__ import annotations

import random

import pytest

from specrun.evaluation.tune.halving import Trial, effort, halve, spread_out


def value(trial: Trial[int, float]) -> float:
    return trial.measured


def never() -> bool:
    return False


def test_the_best_is_found_and_rounds_cost_the_same() -> None:
    measured: list[tuple[int, int]] = []

    def measure(candidate: int, number: int) -> float:
        measured.append((number, candidate))
        return float(candidate)

    trials = halve(random.Random(1).sample(range(16), 16), measure, value, never)
    assert [trial.candidate for trial in trials[:4]] == [15, 14, 13, 12]
    assert [trial.round for trial in trials] == [3, 3, 2, 2, *[1] * 4, *[0] * 8]
    rounds = [[c for n, c in measured if n == number] for number in range(4)]
    assert [len(found) for found in rounds] == [16, 8, 4, 2]
    texts = [len(found) * effort(number, 4, 1000)[0] for number, found in enumerate(rounds)]
    assert texts == [64] * 4
    assert rounds[1] == sorted(rounds[1], reverse=True), "the best of the last round first"


def test_a_wrong_impression_is_corrected_by_longer_rounds() -> None:
    """In the first round 3 looks better than 4."""
    trials = halve([1, 2, 3, 4], lambda c, number: {3: 5.0}.get(c, c) if number == 0 else c, value, never)
    assert trials[0].candidate == 4


def test_candidates_that_cannot_be_measured_drop_out() -> None:
    trials = halve([1, 2, 3, 4], lambda c, _: None if c == 4 else c, value, never)
    assert [trial.candidate for trial in trials] == [3, 2, 1]
    assert halve([1], lambda c, _: None, value, never) == []
    (only,) = halve([7], lambda c, _: c, value, never)
    assert (only.candidate, only.round) == (7, 0)


@pytest.mark.parametrize(("limit", "best"), [(0, []), (2, [2, 1]), (5, [4, 3, 2, 1]), (6, [4, 3, 2, 1])])
def test_what_was_measured_when_the_time_is_over_counts(limit: int, best: list[int]) -> None:
    done = 0

    def measure(candidate: int, _number: int) -> float:
        nonlocal done
        done += 1
        return float(candidate)

    trials = halve([1, 2, 3, 4], measure, value, lambda: done >= limit)
    assert [trial.candidate for trial in trials] == best
    assert done == limit


@pytest.mark.parametrize(
    ("number", "expected"), [(0, (4, 1)), (1, (8, 1)), (2, (10, 1)), (3, (10, 3)), (4, (10, 6)), (5, (10, 12))]
)
def test_a_round_decodes_about_twice_as_many_texts(number: int, expected: tuple[int, int]) -> None:
    assert effort(number, 4, 10) == expected


def test_prompts_come_from_the_whole_list() -> None:
    assert spread_out(range(33), 3) == [0, 11, 22]
    assert spread_out("abc", 3) == ["a", "b", "c"]
