"""Acceptance as pure functions: cases by hand, and its output distribution computed exactly."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest

from specrun.sampling.acceptance import accept_logits, accept_tokens
from specrun.sampling.sampler import Floats
from tests.helpers.reference import Doubles

JUST_BELOW_1 = math.nextafter(1, 0)


def floats(values: Any) -> Floats:
    return np.asarray(values, np.float32)


@pytest.mark.parametrize(
    "draft, target, accepted, next_token",
    [
        ([], [7], 0, 7),
        ([1], [1, 9], 1, 9),
        ([1], [2, 9], 0, 2),
        ([1, 2, 3], [1, 2, 3, 4], 3, 4),
        ([5, 2, 3], [1, 2, 3, 4], 0, 1),
        ([1, 5, 3], [1, 2, 3, 4], 1, 2),
        ([1, 2, 5], [1, 2, 3, 4], 2, 3),
        ([0, 0, 0], [0, 1, 0, 0], 1, 1),
    ],
)
def test_tokens_by_hand(draft: list[int], target: list[int], accepted: int, next_token: int) -> None:
    assert accept_tokens(draft, target) == (accepted, next_token)


def test_tokens_commit_the_targets_choices_and_as_many_as_agree() -> None:
    for draft in itertools.product(range(3), repeat=3):
        for target in itertools.product(range(3), repeat=4):
            accepted, next_token = accept_tokens(draft, target)
            assert (*draft[:accepted], next_token) == target[: accepted + 1]
            assert accepted == 3 or draft[accepted] != target[accepted]


P = floats([[0.5, 0.3, 0.2, 0.0], [0.1, 0.2, 0.3, 0.4], [0.25, 0.25, 0.25, 0.25]])
Q = floats([[0.2, 0.4, 0.2, 0.2], [0.4, 0.3, 0.2, 0.1]])


@pytest.mark.parametrize(
    "draft, uniforms, accepted, weights",
    [
        ([0, 3], [JUST_BELOW_1, JUST_BELOW_1], 2, [0.25, 0.25, 0.25, 0.25]),  # p > q: always.
        ([1, 3], [0.74, 0.5], 2, [0.25, 0.25, 0.25, 0.25]),  # p / q = 0.75.
        ([1, 3], [0.76, 0.5], 0, [0.3, 0, 0, 0]),
        ([3, 3], [0.0, 0.0], 0, [0.3, 0, 0, 0]),  # p = 0: never, even when u is 0.
        ([0, 0], [0.9, 0.24], 2, [0.25, 0.25, 0.25, 0.25]),  # p / q = 0.25.
        ([0, 0], [0.9, 0.26], 1, [0, 0, 0.1, 0.3]),
        ([3, 0], [0.9, 0.0], 0, [0.3, 0, 0, 0]),  # What follows a rejection does not matter.
    ],
)
def test_logits_by_hand(draft: list[int], uniforms: list[float], accepted: int, weights: list[float]) -> None:
    found, left = accept_logits(draft, Q, P, uniforms)
    assert found == accepted
    np.testing.assert_allclose(left, weights, atol=1e-7)


def test_logits_without_drafts_draw_from_the_target() -> None:
    accepted, weights = accept_logits([], np.empty((0, 4), np.float32), P[:1], [])
    assert accepted == 0
    np.testing.assert_array_equal(weights, P[0])


def test_logits_inputs_stay_as_they_are() -> None:
    p, q = P.copy(), Q.copy()
    accept_logits([1, 0], q, p, [0.9, 0.9])
    np.testing.assert_array_equal(p, P)
    np.testing.assert_array_equal(q, Q)


@pytest.mark.parametrize("u", [0.0, 0.5, 0.999999])
def test_a_draft_equal_to_the_target_is_always_accepted(u: float) -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        p = floats(rng.dirichlet(np.full(8, 0.3), 4))
        p[:, 0] = 0
        draft = [int(rng.choice(np.flatnonzero(row))) for row in p[:3]]
        accepted, weights = accept_logits(draft, p[:3], p, [u] * 3)
        assert accepted == 3
        np.testing.assert_array_equal(weights, p[3])


def test_a_draft_equal_to_the_target_is_accepted_by_the_largest_uniform() -> None:
    assert accept_logits([0], P[:1], P[:2], [JUST_BELOW_1])[0] == 1


def test_logits_that_are_one_hot_are_greedy() -> None:
    hot = np.eye(3, dtype=np.float32)
    for draft in itertools.product(range(3), repeat=2):
        for target in itertools.product(range(3), repeat=3):
            for u in (0.0, 0.5, 0.999999):
                accepted, weights = accept_logits(draft, hot[list(draft)], hot[list(target)], [u, u])
                assert (accepted, int(weights.argmax())) == accept_tokens(draft, target)
                assert np.count_nonzero(weights) == 1


def test_a_rejection_that_leaves_nothing_over_draws_from_the_target() -> None:
    p = floats([[0.5, 0.5], [1, 0]])
    q = floats([[0.5, np.nextafter(np.float32(0.5), np.float32(1))]])
    accepted, weights = accept_logits([1], q, p, [JUST_BELOW_1])
    assert accepted == 0
    np.testing.assert_array_equal(weights, p[0])


def chance(draft: tuple[int, ...], q: Floats, p: Floats) -> float:
    """The probability that the last of ``draft`` stands when those before it do: where acceptance ends on [0, 1)."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        if accept_logits(draft, q, p, [0.0] * (len(draft) - 1) + [middle])[0] == len(draft):
            low = middle
        else:
            high = middle
    return low


def law(q: Floats, p: Floats, draft: tuple[int, ...] = (), mass: float = 1.0) -> Counter[tuple[int, ...]]:
    """The exact distribution of what a round commits after ``draft`` stood, over all drafts and uniforms."""
    committed: Counter[tuple[int, ...]] = Counter()

    def commit(before: tuple[int, ...], weights: Floats, share: float) -> None:
        for token, weight in enumerate(weights.astype(np.float64)):
            committed[*before, token] += share * weight / weights.sum(dtype=np.float64)

    here = len(draft)
    if here == len(q):
        commit(draft, accept_logits(draft, q, p, [0.0] * here)[1], mass)
        return committed
    for token in np.flatnonzero(q[here]):
        tried, share = (*draft, int(token)), mass * float(q[here, token])
        stands = chance(tried, q[: here + 1], p)
        if stands < 1 - 1e-9:
            _, weights = accept_logits(tried, q[: here + 1], p, [0.0] * here + [JUST_BELOW_1])
            commit(draft, weights, share * (1 - stands))
        if stands > 1e-9:
            committed += law(q, p, tried, share * stands)
    return committed


def pairs_of_distributions() -> dict[str, tuple[Floats, Floats]]:
    rng = np.random.default_rng(5)
    even = np.full((3, 3), 1 / 3)
    sparse = rng.dirichlet(np.full(3, 0.1), 3)
    sparse[sparse < 1e-3] = 0
    pairs = {
        "random": (rng.dirichlet(np.ones(3), 2), rng.dirichlet(np.ones(3), 3)),
        "equal": (even[:2], even),
        "disjoint": (np.array([[1, 0, 0], [0, 0.5, 0.5]]), np.array([[0, 0.3, 0.7], [1, 0, 0], [0.2, 0.3, 0.5]])),
        "opposite": (np.array([[0.8, 0.15, 0.05]] * 2), np.array([[0.05, 0.15, 0.8]] * 3)),
        "peaked": (rng.dirichlet(np.full(3, 0.2), 2), rng.dirichlet(np.full(3, 0.2), 3)),
        "zeros in p": (rng.dirichlet(np.ones(3), 2), sparse),
    }
    return {name: tuple(floats(x / x.sum(-1, keepdims=True)) for x in pair) for name, pair in pairs.items()}  # type: ignore[misc]


@pytest.mark.parametrize("name", pairs_of_distributions())
def test_what_a_round_commits_is_distributed_as_the_target_exactly(name: str) -> None:
    q, p = pairs_of_distributions()[name]
    committed = law(q, p)
    assert sum(committed.values()) == pytest.approx(1, abs=1e-6)
    # Wherever a round got as far as position i, the token there is distributed as p_i.
    for i in range(len(p)):
        reached: dict[tuple[int, ...], Doubles] = {}
        for tokens, mass in committed.items():
            if len(tokens) > i:
                reached.setdefault(tokens[:i], np.zeros(p.shape[1]))[tokens[i]] += mass
        for before, masses in reached.items():
            expected = masses.sum() * p[i].astype(np.float64)
            np.testing.assert_allclose(masses, expected, atol=1e-6, err_msg=f"after {before}")
    # And a token stands with probability sum(min(p, q)).
    stood = sum(mass for tokens, mass in committed.items() if len(tokens) > 1)
    assert stood == pytest.approx(float(np.minimum(p[0], q[0]).sum()), abs=1e-6)
