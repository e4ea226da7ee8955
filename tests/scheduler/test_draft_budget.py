"""Draft lengths of a batch's rows, where a pass takes as long as its rows have tokens together."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from specrun.scheduler.draft_budget import Speed, batch_tokens, min_survival, share, time_of
from specrun.scheduler.draft_length import DraftLength
from specrun.scheduler.round_times import ExpectedTimes
from tests.helpers.row import Row

SECONDS = [1.0, 1.3, 1.65, 2.0, 2.5]


def rate_of(lens: tuple[int, ...], alphas: list[float], draft_step: float) -> float:
    mean = sum(lens) / len(lens)
    tokens = sum(sum(alpha**i for i in range(length + 1)) for alpha, length in zip(alphas, lens, strict=True))
    return tokens / (time_of(SECONDS, mean) + (max(lens) - mean) * draft_step)


@pytest.mark.parametrize("draft_step", [0.0, 0.05])
def test_no_other_lengths_yield_more(draft_step: float) -> None:
    """Where a further draft step costs nothing. Else hardly any do: lengths are found one token after the other."""
    generator = np.random.default_rng(2)
    for _ in range(40):
        alphas, limits = generator.uniform(0, 1, 3).tolist(), generator.integers(0, 5, 3).tolist()
        lens, rate = share(SECONDS, draft_step, alphas, limits)
        assert rate == pytest.approx(rate_of(tuple(lens), alphas, draft_step))
        assert all(length <= limit for length, limit in zip(lens, limits, strict=True))
        best = max(rate_of(own, alphas, draft_step) for own in itertools.product(*(range(n + 1) for n in limits)))
        assert rate >= best * (0.99 if draft_step else 1 - 1e-9)


@pytest.mark.parametrize("rows", [4, 8, 16])
def test_rows_of_different_drafts_gain_by_lengths_of_their_own(rows: int) -> None:
    alphas = np.linspace(0.3, 0.95, rows).tolist()
    uniform = max(
        tokens / seconds for tokens, seconds in zip(batch_tokens(alphas, [4] * rows, 4), SECONDS, strict=True)
    )
    lens, rate = share(SECONDS, 0.02, alphas, [4] * rows)
    assert rate > 1.05 * uniform
    assert lens == sorted(lens)
    assert lens[0] < lens[-1]


def test_a_price_is_what_a_token_keeps_the_batch_from() -> None:
    expected = ExpectedTimes(SECONDS, 0.1)
    assert expected.passes == pytest.approx([0.2, 0.25, 0.25, 0.4])
    assert min_survival(expected.passes, 12.0, 4) == pytest.approx([0.6, 0.75, 0.75, 1.2])


def test_speed_is_a_mean_of_late_rounds() -> None:
    speed = Speed()
    assert speed.rate(7.0) == 7.0
    speed.add(4, 2.0)
    assert 2.0 < speed.rate(7.0) < 7.0
    for _ in range(300):
        speed.add(3, 1.0)
    assert speed.rate(7.0) == pytest.approx(3.0, rel=0.2)


def test_a_rows_own_rate_sets_its_length() -> None:
    """Whose drafts do not end by themselves, as of sampled texts."""
    lengths = DraftLength(4, None, lambda rows: ExpectedTimes(SECONDS), by_row=True)
    good, bad = Row(), Row()
    for _ in range(30):
        plan = lengths.choose([good, bad], [4, 4])
        if plan.draft_len:
            accepted = [(plan.row_lens[0],) * 2, (0, min(1, plan.row_lens[1]))]
            lengths.observe(sum(plan.row_lens) / 2, time_of(SECONDS, sum(plan.row_lens) / 2), [good, bad], accepted)
        else:
            lengths.observe(0, 1.0, [good, bad], [(0, 0), (0, 0)])
    assert plan.row_lens[0] == 4
    assert plan.row_lens[1] <= 1
    assert lengths.choose([good], [4]).row_lens == (), "a row alone has no others to share with"
