"""When ``auto`` leaves off drafting: what plain rounds take, and what drafts that end by themselves have yielded."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from specrun.request.request import Outcome, Request
from specrun.speculative.draft_length import DraftLength
from specrun.speculative.round import RoundResult
from specrun.speculative.round_times import ExpectedTimes
from tests.helpers.told_rounds import text, told


def drafted_share(alpha: float, drafting: float, rounds: int = 1500) -> float:
    """Of the later half of the rounds: how many drafted. A draft has one token.

    drafting: the time of such a round, in plain ones among plain ones. A plain round behind a draft takes 1.25.
    """
    expected = ExpectedTimes([1.25, drafting])
    lengths, row, drafted = DraftLength(1, None, lambda _: expected), text(), [0]
    for number in range(rounds):
        g = lengths.choose([row], [1]).draft_len
        seconds = drafting if g else 1.25 if drafted[-1] else 1.0
        lengths.observe([row], told(g, seconds, [(g * (number % 100 < 100 * alpha), g)]))
        drafted.append(g)
    return sum(drafted[rounds // 2 :]) / (rounds - rounds // 2)


def test_steps_that_follow_one_another_are_what_drafts_have_to_beat() -> None:
    """1.9 tokens in 2.05 steps; beside a step of 1.25 they would seem to pay."""
    assert drafted_share(0.9, 2.05) < 0.1, "trials, which lose little"
    assert drafted_share(0.9, 1.6) > 0.8


def _that_looks_up(looks_up: bool) -> DraftLength:
    """Where a draft step takes as long as the target's."""
    return DraftLength(4, None, lambda _: ExpectedTimes([1.0, 2.1, 3.2, 4.3, 5.4], 1.0), looks_up=looks_up)


def test_what_is_looked_up_says_nothing_of_the_model() -> None:
    """A draft step costs too much. What rounds without one yield is not counted as the model's."""
    lengths, row = _that_looks_up(True), text()
    for number in range(400):
        plan = lengths.choose([row], [3], drafts_end=True)
        if number % 2:
            found = Outcome(3, [0] * 3, 0, looked_up=True)
            lengths.observe([row], RoundResult([found], None, 3))
        else:
            lengths.observe([row], told(plan.draft_len, 1.0 + 1.1 * plan.draft_len, [(0, plan.draft_len)]))
    assert not lengths.drafting
    assert list(plan.lens) == [0] and list(plan.lookup_lens) == [3]
    assert plan.min_survival == pytest.approx([0.1] * 4, rel=0.1), "what a token more costs to verify"
    assert not _that_looks_up(False).choose([row], [3]).lookup_lens


def decode(lengths: DraftLength, rows: Sequence[Request], rounds: int, tokens: int, plain_seconds: float = 1.0) -> int:
    """Rounds in which each row's draft ends by itself and yields ``tokens`` in 2 seconds.

    What drafts keep is mostly accepted, so acceptance rates say that longer drafts would pay. Returns how many drafted.
    """
    drafted = 0
    for _ in range(rounds):
        draft_len = lengths.choose(rows, [4] * len(rows), 0, drafts_end=True).draft_len
        drafted += bool(draft_len)
        outcome = (tokens - 1, tokens - 1) if draft_len else (0, 0)
        seconds = 2.0 if draft_len else plain_seconds
        lengths.observe(rows, told(tokens - 1 if draft_len else 0, seconds, [outcome] * len(rows)))
    return drafted


@pytest.mark.parametrize("tokens, pays", [(3, True), (2, False)])
def test_drafts_that_end_row_by_row_are_judged_by_what_they_yielded(tokens: int, pays: bool) -> None:
    """Two tokens a row in the time of two plain rounds are no gain, whatever the acceptance rate promises."""
    expected = ExpectedTimes([1.0, 2.0, 2.1, 2.2, 2.3], 0.05)
    lengths = DraftLength(4, None, lambda _: expected, skips_unused_tokens=True)
    rows = [text() for _ in range(4)]
    decode(lengths, rows, 300, tokens)
    assert lengths.drafting == pays
    assert (decode(lengths, rows, 200, tokens) > 100) == pays


def test_plain_rounds_of_long_ago_do_not_count() -> None:
    """Three tokens a row in the time of 2.5 plain rounds are a gain; in that of 3.3, once memory is faster, a loss."""
    expected = ExpectedTimes([0.8, 2.0, 2.1, 2.2, 2.3], 0.05)
    lengths = DraftLength(4, None, lambda _: expected, skips_unused_tokens=True)
    rows = [text() for _ in range(4)]
    for _ in range(300):
        lengths.observe(rows, told(0, 0.8, [(0, 0)] * 4))
    assert decode(lengths, rows, 300, 3, 0.8) > 200
    decode(lengths, rows, 1000, 3, 0.6)
    assert decode(lengths, rows, 200, 3, 0.6) < 80, "trials, which lose little"
