"""A plan stands for some rounds, and what is seen in them is learnt behind the last one."""

from __future__ import annotations

import itertools
from typing import Any

from specrun.drafters.draft_plan import DraftPlan
from specrun.scheduler.draft_length import DraftLength
from specrun.scheduler.plan_cache import PlanCache
from specrun.scheduler.round_times import ExpectedTimes
from tests.helpers.row import Row

MOST, LATER = 4, 900
STEP = 0.01
"""Seconds of the target."""


class Learner(DraftLength):
    """Counts the rounds that it has learnt from."""

    learnt = 0

    def observe(self, *what: Any) -> None:
        super().observe(*what)
        self.learnt += 1


def opened(cost: float, rounds: int = LATER) -> tuple[Learner, PlanCache, Row]:
    """Behind so many rounds of one text, of drafts that end. cost: of a draft token, in steps of the target."""
    lengths = Learner(MOST, None, lambda _: ExpectedTimes([STEP * (1 + cost * g) for g in range(MOST + 1)]))
    kept, text = PlanCache(lengths), Row()
    for _ in range(rounds):
        run(kept, text, cost)
    return lengths, kept, text


def run(kept: PlanCache, text: Row, cost: float = 0.1) -> DraftPlan:
    """A round whose draft is right where it costs little. Returns its plan."""
    plan = kept.choose([text], [MOST], 0, True)
    evaluated = (plan.draft_len, plan.draft_len) if cost < 1 else (0, min(1, plan.draft_len))
    kept.observe(plan.draft_len, STEP * (1 + cost * plan.draft_len), [text], [evaluated])
    return plan


def end_of_a_plan(lengths: Learner, kept: PlanCache, text: Row) -> int:
    """Run until all rounds so far were learnt from. Returns how many."""
    before = lengths.learnt
    while lengths.learnt == before:
        run(kept, text)
    return lengths.learnt


def test_a_plan_stands_for_more_rounds_the_more_were_measured() -> None:
    _, kept, text = opened(0.1, 0)
    plans = [run(kept, text) for _ in range(LATER)]
    assert {plan.rounds for plan in plans[:64]} == {1}
    assert {plan.rounds for plan in plans[-64:]} == {8}
    assert len({id(plan) for plan in plans[-64:]}) <= 9


def test_what_was_seen_is_learnt_behind_the_plans_last_round() -> None:
    lengths, kept, text = opened(0.1)
    before, learnt = end_of_a_plan(lengths, kept, text), list[int]()
    for _ in range(9):
        run(kept, text)
        learnt.append(lengths.learnt - before)
    assert learnt == [0] * 7 + [8] * 2


def test_other_texts_have_a_plan_of_their_own_which_knows_of_all_rounds() -> None:
    lengths, kept, text = opened(0.1)
    before = end_of_a_plan(lengths, kept, text)
    plan = run(kept, text)
    assert (plan.rounds, lengths.learnt - before) == (8, 0)
    other = Row()
    assert run(kept, other) is not plan
    assert lengths.learnt - before == 1
    assert kept.choose([other], [2], 0, True).draft_len <= 2, "nor does a plan stand for other limits"
    assert kept.choose([other], [MOST], 0, False).draft_len == MOST, "or for drafts that do not end"


def test_a_trial_is_a_single_round() -> None:
    """A draft that never pays is tried again now and then."""
    _, kept, text = opened(3.0)
    plans = [run(kept, text, 3.0) for _ in range(5000)]
    lens = [plan.draft_len for plan in plans]
    assert sum(map(bool, lens)) > 3
    assert not any(one and other for one, other in itertools.pairwise(lens))
    assert plans[-1].rounds == 8
