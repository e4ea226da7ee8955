"""Counts of rounds under vLLM's names: each from the rounds themselves."""

from __future__ import annotations

import pytest

from specrun.request.stats import Stats, speculative_decoding

ROUNDS = [(4, 1), (4, 4), (0, 0), (2, 0), (4, 1), (3, 3)]
"""Draft tokens of a round, and the accepted ones."""


def counted(rounds: list[tuple[int, int]], max_draft_len: int = 5) -> Stats:
    stats = Stats(max_draft_len=max_draft_len)
    for drafted, accepted in rounds:
        stats.count_round(drafted, accepted, accepted + 1, 0.0)
    return stats


def test_a_step_is_a_round_that_drafted() -> None:
    assert speculative_decoding([counted(ROUNDS)]) == {
        "mean_acceptance_length": 1 + 9 / 5,
        "draft_acceptance_rate": 9 / 17,
        "num_spec_steps": 5,
        "num_draft_tokens": 17,
        "num_accepted_draft_tokens": 9,
        "num_spec_tokens": 5,
        "acceptance_histogram": [1, 2, 0, 1, 1, 0],
        "acceptance_histogram_by_draft_length": {"2": [1, 0, 0], "3": [0, 0, 0, 1], "4": [0, 2, 0, 0, 1]},
    }


def test_requests_add_up() -> None:
    assert speculative_decoding([counted(ROUNDS[:2]), counted(ROUNDS[2:], 2)]) == speculative_decoding(
        [counted(ROUNDS)]
    )


def test_means_are_finite_where_nothing_was_drafted() -> None:
    found = speculative_decoding([counted([(0, 0)] * 3, 2)])
    assert (found["mean_acceptance_length"], found["draft_acceptance_rate"]) == (1, 0)
    assert (found["acceptance_histogram"], found["acceptance_histogram_by_draft_length"]) == ([0, 0, 0], {})


@pytest.mark.parametrize(("committed", "counts"), [(1, (4, 1)), (3, (4, 3)), (5, (4, 4))])
def test_tokens_behind_the_texts_end_are_not_accepted(committed: int, counts: tuple[int, int]) -> None:
    stats = Stats()
    stats.count_round(4, 4, committed, 0.0)
    assert stats.steps == [counts]
    assert stats.accepted == counts[1]


def test_both_acceptance_rates_of_each_position_follow_from_the_counts() -> None:
    """As docs/serving.md says."""
    stats = counted(ROUNDS)
    by_length = speculative_decoding([stats])["acceptance_histogram_by_draft_length"]
    evaluated = accepted = 0
    for length, counts in by_length.items():
        for position in range(1, int(length) + 1):
            accepted += sum(counts[position:])
            evaluated += sum(counts[position - 1 :])
    assert (accepted, evaluated) == (stats.accepted, stats.evaluated)
