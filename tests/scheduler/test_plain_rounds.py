"""When ``auto`` leaves off drafting: what plain rounds take, and what drafts that end by themselves have yielded."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from specrun.scheduler.draft_budget import Speed
from specrun.scheduler.draft_length import DraftLength
from specrun.scheduler.round_times import ExpectedTimes, PostDraftSlowdown
from tests.helpers.row import Row


def drafted_share(alpha: float, drafting: float, unsettled: float, rounds: int = 1500) -> float:
    """Of the later half of the rounds: how many drafted. A draft has one token.

    drafting: the time of such a round, in plain ones among plain ones. unsettled: the share by which a plain round
    takes longer behind a draft. What is longer about it falls by a fifth with each further plain round.
    """
    expected = ExpectedTimes([1 + unsettled, drafting])
    lengths, row, displaced, found = DraftLength(1, None, lambda _: expected), Row(), 0.0, list[int]()
    for number in range(rounds):
        g = lengths.choose([row], [1]).draft_len
        seconds = drafting if g else 1 + displaced
        displaced = unsettled if g else 0.8 * displaced
        lengths.observe(g, seconds, [row], [(g * (number % 100 < 100 * alpha), g)])
        found.append(g)
    return sum(found[rounds // 2 :]) / (rounds - rounds // 2)


def test_steps_that_follow_one_another_are_what_drafts_have_to_beat() -> None:
    """1.9 tokens in 2.05 steps; beside a step of 1.25 they would seem to pay."""
    assert drafted_share(0.9, 2.05, 0.25) < 0.05
    assert drafted_share(0.9, 1.6, 0.25) > 0.8


def test_control_steps_that_are_alone_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PostDraftSlowdown, "settled", lambda _self, _draft_len, seconds: seconds)
    monkeypatch.setattr(PostDraftSlowdown, "ROUNDS", 1)
    assert drafted_share(0.9, 2.05, 0.25) > 0.5


@pytest.mark.parametrize("first", [1.0, 1.3])
def test_a_run_says_what_a_round_that_is_alone_would_take(first: float) -> None:
    settling = PostDraftSlowdown()
    for _ in range(3):
        assert settling.settled(True, 3.0) == 3.0
        for place in range(PostDraftSlowdown.ROUNDS):
            settling.settled(False, first if place == 0 else 1.0)
    settling.settled(True, 3.0)
    assert settling.settled(False, first) == pytest.approx(1.0)
    assert settling.settled(False, 1.1) is None, "it is neither alone nor settled"
    assert settling.settled(True, None) is None


def test_what_was_expected_of_drafts_is_forgotten() -> None:
    speed = Speed()
    assert speed.rate(2.0) == 2.0
    speed.add(1, 1.0)
    assert speed.rate(2.0) > 1.8
    for _ in range(400):
        speed.add(1, 1.0)
    assert speed.rate(2.0) == pytest.approx(1.0, abs=0.01)


def decode(lengths: DraftLength, rows: Sequence[Row], rounds: int, tokens: int, plain_seconds: float = 1.0) -> int:
    """Rounds in which each row's draft ends by itself and yields ``tokens`` in 2 seconds.

    What drafts keep is mostly accepted, so acceptance rates say that longer drafts would pay. Returns how many drafted.
    """
    drafted = 0
    for _ in range(rounds):
        plan = lengths.choose(rows, [4] * len(rows), 0, drafts_end=True)
        drafted += bool(plan.draft_len)
        outcome = (tokens - 1, tokens - 1) if plan.draft_len else (0, 0)
        seconds = 2.0 if plan.draft_len else plain_seconds
        lengths.observe(tokens - 1 if plan.draft_len else 0, seconds, rows, [outcome] * len(rows))
    return drafted


@pytest.mark.parametrize("tokens, pays", [(3, True), (2, False)])
def test_drafts_that_end_row_by_row_are_judged_by_what_they_yielded(tokens: int, pays: bool) -> None:
    """Two tokens a row in the time of two plain rounds are no gain, whatever the acceptance rate promises."""
    lengths = DraftLength(4, None, lambda _: ExpectedTimes([1.0, 2.0, 2.1, 2.2, 2.3], 0.05), by_row=True)
    rows = [Row() for _ in range(4)]
    decode(lengths, rows, 300, tokens)
    assert lengths.drafting == pays
    assert (decode(lengths, rows, 200, tokens) > 100) == pays


def test_plain_rounds_of_long_ago_do_not_count() -> None:
    """Three tokens a row in the time of 2.5 plain rounds are a gain; in that of 3.3, once memory is faster, a loss."""
    lengths = DraftLength(4, None, lambda _: ExpectedTimes([0.8, 2.0, 2.1, 2.2, 2.3], 0.05), by_row=True)
    rows = [Row() for _ in range(4)]
    for _ in range(300):
        lengths.observe(0, 0.8, rows, [(0, 0)] * 4)
    assert decode(lengths, rows, 300, 3, 0.8) > 200
    decode(lengths, rows, 600, 3, 0.6)
    assert decode(lengths, rows, 200, 3, 0.6) < 20


@pytest.mark.parametrize("limit, drafts", [(10, True), (3, False)])
def test_a_draft_that_is_far_behind_does_not_read_texts_that_are_about_to_end(limit: int, drafts: bool) -> None:
    lengths, row = DraftLength(10, None, lambda _: ExpectedTimes([1 + 0.1 * g for g in range(11)])), Row()
    for _ in range(50):
        g = lengths.choose([row], [10]).draft_len
        lengths.observe(g, 1 + 0.1 * g, [row], [(g, g)])
    assert lengths.choose([row], [limit]).draft_len
    assert bool(lengths.choose([row], [limit], num_uncached_draft=400).draft_len) == drafts
    assert lengths.drafting == drafts
