"""The choice of the draft length, against machines whose costs and drafts whose acceptance rates are made up."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.request.request import Request
from specrun.request.stats import expected_tokens
from specrun.sampling.sampler import SamplingParams
from specrun.speculative.draft_length import DraftLength
from specrun.speculative.round_times import ExpectedTimes
from tests.helpers.pairs import PROMPTS, SAMPLED, decode, near_ties
from tests.helpers.told_rounds import text, told

MOST = 10


def test_expected_tokens_is_the_geometric_series() -> None:
    for alpha in (0.0, 0.3, 0.999, 1.0):
        for g in (0, 1, 5):
            assert expected_tokens(alpha, g) == pytest.approx(sum(alpha**i for i in range(g + 1)))


def seconds_a_token(
    chooser: DraftLength,
    alpha: Callable[[int], float],
    cost: float,
    width: float,
    rows: int = 1,
    tokens: int = 3000,
    drift: float = 0.0,
    seed: int = 5,
    noise: float = 0.05,
    texts: int = 4,
    time_of: Callable[[int, int], float] | None = None,
    proposes: Callable[[np.random.Generator, int], int] = lambda _, g: g,
    drafts_end: bool = False,
) -> float:
    """Simulated decoding: a target step takes 1, a draft step ``cost``, every further token of a verify pass ``width``.

    alpha: the acceptance rate after so many tokens. A draft that has rested pays ``width`` a token to catch up, as
    much as a target of its cost would. Times are seen with ``noise``, as on a shared machine, and all of them drift up
    and down by about ``drift`` within some 30 rounds: the result is in what the target takes at the time.
    time_of: of a round of so many rows and draft tokens, in place of that line. All rows have ``texts`` texts.
    proposes: how many draft tokens a row gets that asks for so many. drafts_end: see ``DraftLength.choose``.
    """
    lengths, generator, pace = chooser, np.random.default_rng(seed), 0.0
    elapsed, lengths_of_rows, behind = 0.0, np.zeros(rows), 0
    for request in range(texts):
        requests = [text() for _ in range(rows)]
        lengths_of_rows[:], behind = 0, 0
        while lengths_of_rows.min() < tokens / texts:
            g = lengths.choose(requests, [MOST] * rows, behind, drafts_end).draft_len
            rates = np.array([alpha(int(request * tokens / texts + length)) for length in lengths_of_rows])
            rejected = np.ones((rows, g + 1), np.bool_)
            rejected[:, :g] = generator.random((rows, g)) > rates[:, None]
            drafted = [proposes(generator, g) if g else 0 for _ in requests]
            rejected[np.arange(rows), drafted] = True
            accepted = rejected.argmax(1)
            lengths_of_rows += accepted + 1
            outcomes = [(stood, min(own, stood + 1)) for stood, own in zip(accepted.tolist(), drafted, strict=True)]
            asked, g = g, max(drafted)
            time = time_of(rows, g) if time_of else 1 + g * (cost + width)
            time += behind * width * cost if asked else 0
            if drift:
                pace += drift * np.sqrt(2 / 30) * generator.normal() - pace / 30
            lengths.observe(requests, told(g, time * generator.lognormal(pace, noise), outcomes), behind)
            behind = 0 if asked else behind + 1
            elapsed += time
    return elapsed / tokens


def seconds_of_fixed(
    g: int,
    alpha: float,
    time_of: Callable[[int, int], float],
    rows: int = 1,
    tokens: int = 3000,
    seed: int = 5,
    texts: int = 4,
    proposes: Callable[[np.random.Generator, int], int] = lambda _, g: g,
) -> float:
    """``seconds_a_token`` of a fixed length and an acceptance rate that stays: its rounds are drawn together."""
    generator, elapsed = np.random.default_rng(seed), 0.0
    for _ in range(texts):
        drafted = np.array(
            [[proposes(generator, g) if g else 0 for _ in range(rows)] for _ in range(-(-tokens // texts))]
        )
        rejected = np.ones((*drafted.shape, g + 1), np.bool_)
        rejected[..., :g] = generator.random((*drafted.shape, g)) > alpha
        lengths = (np.minimum(rejected.argmax(2), drafted) + 1).cumsum(0).min(1)
        rounds = int(lengths.searchsorted(tokens / texts)) + 1
        elapsed += sum(time_of(rows, most) for most in drafted[:rounds].max(1).tolist())
    return elapsed / tokens


def timed(cost: float, width: float, seed: int) -> Callable[[int], ExpectedTimes]:
    """What is expected where engines were timed: by a machine of another speed, and by rounds that are alone."""
    generator = np.random.default_rng(seed)
    speed, draft = generator.lognormal(0, 0.3), generator.lognormal(0, 0.15)
    return lambda _rows: ExpectedTimes([speed * (1 + draft * g * (cost + width)) for g in range(MOST + 1)])


def fixed(alpha: float, cost: float, width: float) -> list[float]:
    """The same for every fixed length, on average."""
    return [(1 + g * (cost + width)) / expected_tokens(alpha, g) for g in range(MOST + 1)]


@pytest.mark.quick("0.1", "0.03")
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("alpha", [0.5, 0.7, 0.9, 0.98])
@pytest.mark.parametrize("cost, width", [(0.03, 0.05), (0.1, 0.01), (0.2, 0.02)])
def test_within_five_percent_of_the_best_fixed_length(alpha: float, cost: float, width: float, rows: int) -> None:
    best = min(seconds_of_fixed(g, alpha, lambda _, g: 1 + g * (cost + width), rows) for g in range(MOST + 1))
    chosen = [
        seconds_a_token(DraftLength(MOST, None), lambda _: alpha, cost, width, rows, seed=seed) for seed in range(3)
    ]
    assert np.mean(chosen) <= 1.05 * best


@pytest.mark.parametrize("alpha, cost, width", [(0.9, 0.03, 0.05), (0.6, 0.1, 0.01)])
def test_nor_far_from_it_on_a_noisy_machine(alpha: float, cost: float, width: float) -> None:
    """A length that had bad luck is not ruled out for good."""
    best = min(seconds_of_fixed(g, alpha, lambda _, g: 1 + g * (cost + width)) for g in range(MOST + 1))
    for seed in range(8):
        lengths = DraftLength(MOST, None)
        assert seconds_a_token(lengths, lambda _: alpha, cost, width, drift=0.1, seed=seed, noise=0.25) <= 1.1 * best


@pytest.mark.quick("0.6-12-8", "0.9-12-1")
@pytest.mark.parametrize("rows", [1, 2, 4, 8])
@pytest.mark.parametrize("alpha, step", [(0.6, 12), (0.76, 12), (0.9, 12), (0.76, 6)])
def test_times_that_are_no_straight_line(rows: int, alpha: float, step: int) -> None:
    """Processors multiply so many rows at a time: a verify pass of 13 tokens may take as long as one of 24."""

    def time_of(batch: int, draft_len: int) -> float:
        return 0.4 + 0.05 * step * -(-batch * (draft_len + 1) // step) + 0.01 * draft_len

    run: dict[str, Any] = {"rows": rows, "tokens": 1500, "texts": 8, "time_of": time_of}
    chosen = [
        seconds_a_token(DraftLength(MOST, None), lambda _: alpha, 0.01, 0.02, seed=seed, **run) for seed in range(6)
    ]
    of_fixed = [[seconds_of_fixed(g, alpha, seed=seed, **run) for seed in range(12)] for g in range(MOST + 1)]
    assert np.mean(chosen) <= 1.08 * np.mean(of_fixed, axis=1).min()


def test_a_new_batch_size_begins_with_what_others_have_told() -> None:
    lengths = DraftLength(4, None)
    rows = [text(), text(), text()]
    for _ in range(60):
        g = lengths.choose(rows, [4] * 3).draft_len
        lengths.observe(rows, told(g, 0.01 + 0.001 * g, [(g, g)] * 3))
    chosen = []
    for _ in range(12):
        g = lengths.choose(rows[:2], [4] * 2).draft_len
        lengths.observe(rows[:2], told(g, 0.01 + 0.001 * g, [(g, g)] * 2))
        chosen.append(g)
    assert chosen == [0] * 2 + [4] * 10, "T(0) is measured, and then none but drafting promises anything"


def test_a_new_batch_size_where_drafting_has_not_paid() -> None:
    lengths, rows = DraftLength(4, None), [text(), text(), text()]
    for count in (3, 2, 1):
        for _ in range(40):
            g = lengths.choose(rows[:count], [4] * count).draft_len
            lengths.observe(rows[:count], told(g, 0.01 * (1 + g), [(0, min(1, g))] * count))
        assert not lengths.drafting


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize(
    "alpha, cost, width", [(0.0, 0.03, 0.05), (0.02, 0.5, 0.1), (0.8, 1.0, 0.06), (1.0, 1.0, 0.06), (0.3, 1.0, 1.0)]
)
def test_never_slower_than_the_target_alone(alpha: float, cost: float, width: float, rows: int) -> None:
    """A draft that guesses, one as costly as the target, a machine on which verifying is no cheaper than decoding."""
    assert min(fixed(alpha, cost, width)) > 0.95
    assert seconds_a_token(DraftLength(MOST, None), lambda _: alpha, cost, width, rows) <= 1 / 0.97


class Kind(NamedTuple):
    """A kind of draft, on a machine where each further token of a verify pass takes 0.06."""

    time_of: Callable[[int], float]
    """What a round of so many draft tokens takes beyond verifying."""
    cost: float = 0.0
    """Of a draft step: it has to read what was written while it rested."""
    proposes: Callable[[np.random.Generator, int], int] = lambda _, g: g
    drafts_end: bool = False


def by_match(generator: np.random.Generator, g: int) -> int:
    """A lookup finds something for a third of the rounds; most matches are short."""
    return min(g, int(generator.geometric(0.25))) if generator.random() < 1 / 3 else 0


KINDS = {
    "head that reads again": Kind(lambda g: 0.09 * g + 0.006 * g, 0.09),
    "heads in one pass": Kind(lambda g: 0.06 + 0.01 * g),
    "lookup": Kind(lambda g: 0.001, proposes=by_match),
    "lookup that ends where it is unsure": Kind(lambda g: 0.001, proposes=by_match, drafts_end=True),
    "another tokenizer": Kind(lambda g: 0.02 + 1.4 * 0.03 * g, 0.03),
    "model that ends where it is unsure": Kind(
        lambda g: 0.03 * (g + 1), 0.03, lambda generator, g: min(g, int(generator.geometric(0.3))), drafts_end=True
    ),
    "lookup beside a model": Kind(lambda g: 0.02 * g, 0.03, lambda generator, g: by_match(generator, g) or g),
}


@pytest.mark.quick("-1")
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_no_kind_of_draft_is_slower_whether_it_is_good_or_useless(kind: Kind, rows: int) -> None:
    def time_of(batch: int, g: int) -> float:
        return 1 + 0.06 * g + kind.time_of(g) if g else 1.0

    run: dict[str, Any] = {"rows": rows, "time_of": time_of, "proposes": kind.proposes}

    def chosen(alpha: float) -> float:
        ends: dict[str, Any] = {"drafts_end": kind.drafts_end, **run}
        found = [
            seconds_a_token(DraftLength(MOST, None), lambda _: alpha, kind.cost, 0.06, seed=seed, **ends)
            for seed in range(3)
        ]
        return float(np.mean(found))

    assert seconds_of_fixed(4, 0.0, **run) > 1.03, "a fixed length shows what there is to lose"
    assert chosen(0.0) <= 1 / 0.97
    best = min(seconds_of_fixed(g, 0.85, **run) for g in range(0, MOST + 1, 2))
    assert best < 0.9
    assert chosen(0.85) <= 1.1 * best, "drafts that end do so by chance here, not where they no longer pay"


@pytest.mark.quick("0.0-0.03-0.03-4", "0.8-1.0-0.06-1")
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize(
    "alpha, cost, width", [(0.0, 0.03, 0.03), (0.02, 0.5, 0.1), (0.8, 1.0, 0.06), (1.0, 1.0, 0.06)]
)
def test_nor_on_a_machine_that_gets_faster_and_slower(alpha: float, cost: float, width: float, rows: int) -> None:
    """Where each length is seen at times of its own."""
    seconds = [
        seconds_a_token(
            DraftLength(MOST, None, timed(cost, width, seed)), lambda _: alpha, cost, width, rows, drift=0.1, seed=seed
        )
        for seed in range(6)
    ]
    assert max(seconds) <= 1 / 0.94
    assert np.mean(seconds) <= 1 / 0.98


def test_a_draft_that_becomes_good_is_found_again() -> None:
    lengths = DraftLength(MOST, None)
    assert seconds_a_token(lengths, lambda _: 0.0, 0.03, 0.05) > 0.97
    assert not lengths.drafting
    assert lengths.choose([text()], [MOST]).draft_len <= 1
    found = seconds_a_token(lengths, lambda _: 0.9, 0.03, 0.05, tokens=12_000)
    assert found < 1.25 * min(fixed(0.9, 0.03, 0.05))


def test_a_slow_round_rules_nothing_out() -> None:
    """Preparing a length takes long, once, and is not timed; the first round that is may have bad luck."""
    lengths, row, calls = DraftLength(4, None), text(), [0] * 5
    for _ in range(400):
        g = lengths.choose([row], [4]).draft_len
        calls[g] += 1
        seconds = [None, 0.5 if g > 1 else 0.01][calls[g] - 1] if calls[g] <= 2 else 0.01 + 0.001 * g
        lengths.observe([row], told(g, seconds, [(g, g)]))
    assert lengths.choose([row], [4]).draft_len == 4
    assert calls[4] > 300


def test_what_went_well_for_long_pays_for_no_losses() -> None:
    lengths, row = DraftLength(4, None), text()

    def lost(rounds: int, cost: float) -> float:
        seconds = [0.02 + cost * lengths.choose([row], [4]).draft_len]
        for _ in range(rounds):
            g = lengths.choose([row], [4]).draft_len
            seconds.append(0.02 + cost * g)
            lengths.observe([row], told(g, seconds[-1], [(0, min(1, g))] if cost else [(g, g)]))
        return sum(seconds) / (0.02 * len(seconds)) - 1

    # 1000 seconds, after which 0.033 are lost; if Trials forgot nothing it would be 0.058.
    lost(50_000, 0.0)
    assert lost(15_000, 0.004) < 0.04


def test_a_row_that_can_use_no_drafts_gets_none() -> None:
    lengths = DraftLength(MOST, None)
    rows = [text(), text()]
    for _ in range(20):
        lengths.observe(rows, told(lengths.choose(rows, [MOST, MOST]).draft_len, 0.01, [(1, 1), (1, 1)]))
    assert lengths.choose(rows, [0, 0]).draft_len == 0
    assert lengths.choose(rows, [1, 0]).draft_len <= 1


def test_a_fixed_length_is_always_the_answer() -> None:
    lengths = DraftLength(MOST, 3)
    row = text()
    lengths.observe([row], told(3, 1.0, [(0, 1)]))
    assert lengths.choose([row], [MOST]).draft_len == 3


@pytest.mark.parametrize("params", [SamplingParams(), SAMPLED], ids=["greedy", "sampled"])
def test_the_text_does_not_depend_on_the_lengths_chosen(engines: Path, params: SamplingParams) -> None:
    """Auto is the default, and its choices depend on the clock; the ids are the target's own all the same."""
    alone = decode(SpeculativeDecoder.open(engines / "target"), PROMPTS, params)
    decoder = SpeculativeDecoder.open(engines / "target", engines / "draft", DraftTargetConfig())
    decoder.scheduler.lengths = DraftLength(10, None)  # As if nothing was measured before, so that it tries lengths.
    ties, drafted = 0, set()
    for _ in range(3):
        requests = [Request(prompt, params, 40) for prompt in PROMPTS]
        before = [0] * len(requests)
        for event in decoder.run(requests):
            row = next(i for i, r in enumerate(requests) if r is event.request)
            drafted.add(event.request.stats.drafted - before[row])
            before[row] = event.request.stats.drafted
        for request, expected in zip(requests, alone, strict=True):
            ties += near_ties(engines / "target", expected.output, request.output, request.prompt)
    assert ties <= 2
    assert len(drafted) > 1


SECONDS = [1.0, 1.3, 1.65, 2.0, 2.5]
"""Times of rounds with 0 to 4 draft tokens a row."""


def test_a_rows_own_rate_sets_its_length() -> None:
    """Whose drafts do not end by themselves, as of sampled texts."""
    lengths = DraftLength(4, None, lambda _: ExpectedTimes(SECONDS), skips_unused_tokens=True)
    good, bad = text(), text()
    for _ in range(40):
        lens = lengths.choose([good, bad], [4, 4]).lens
        accepted = [(lens[0], lens[0]), (0, min(1, lens[1]))]
        lengths.observe([good, bad], told(sum(lens) / 2, float(np.interp(sum(lens) / 2, range(5), SECONDS)), accepted))
    assert lens[0] >= 3
    assert not lens[1]


def test_drafts_end_where_the_batch_writes_more_in_the_same_time() -> None:
    """At a token a second and row: a row's token takes 0.3 - 0.1 seconds of all four, a draft step 0.1."""
    for skips in (True, False):
        lengths = DraftLength(4, None, lambda _: ExpectedTimes(SECONDS, 0.1), skips_unused_tokens=skips)
        rows = [text() for _ in range(4)]
        for _ in range(300):
            lengths.observe(rows, told(0, 1.0, [(0, 0)] * 4))
            lengths.observe(rows, told(2, 2.0, [(1, 2)] * 4))
        plan = lengths.choose(rows, [4] * 4, drafts_end=True)
        rate = 8 / 2.0
        steps = np.diff(SECONDS) * 1.2  # The pace: 2 drafts should have taken 1.65.
        if skips:
            np.testing.assert_allclose(plan.min_step_gain, [rate * 0.1] * 4, rtol=0.3)
            np.testing.assert_allclose(plan.min_survival, rate * (steps - 0.1) / 4, rtol=0.5)
        else:
            assert not plan.min_survival
            np.testing.assert_allclose(plan.min_step_gain, rate * steps, rtol=0.5)
