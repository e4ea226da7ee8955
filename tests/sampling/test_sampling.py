"""Sampling as pure functions: the distribution, the random numbers behind it, and the draw from both."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from specrun.errors import BackendError, RequestError
from specrun.sampling.sampler import (
    Floats,
    Purpose,
    SamplingParams,
    exponential_noise,
    gumbel_argmax,
    log_probability,
    probabilities,
    sample,
    uniform,
)
from tests.helpers.reference import chi_squared, exact_probabilities, philox

INF = math.inf
SETTINGS = [
    SamplingParams(temperature, top_k, top_p)
    for temperature, top_k, top_p in [
        (0.0, 0, 1.0),
        (1.0, 0, 1.0),
        (0.3, 0, 1.0),
        (5.0, 0, 1.0),
        (1e-6, 0, 1.0),
        (1e6, 0, 1.0),
        (1.0, 1, 1.0),
        (1.0, 3, 1.0),
        (1.0, 50, 1.0),
        (1.0, 1 << 40, 1.0),
        (1.0, 0, 0.9),
        (1.0, 0, 0.31),
        (1.0, 0, 1e-9),
        (1.0, 0, 1 - 1e-12),
        (0.7, 40, 0.95),
        (1.7, 5, 0.5),
    ]
]


def named(params: SamplingParams) -> str:
    return f"T{params.temperature:g}-k{params.top_k}-p{params.top_p:g}"


def rows_of(vocab_size: int) -> dict[str, Floats]:
    """Logits of many kinds, each [V]."""
    rng = np.random.default_rng(vocab_size)
    normal = rng.normal(0, 3, vocab_size)
    banned = np.where(rng.random(vocab_size) < 0.5, -INF, normal)
    banned[vocab_size // 2] = 0
    alone = np.full(vocab_size, -INF)
    alone[-1] = -7
    rows = {
        "normal": normal,
        "ties": np.round(normal),
        "equal": np.full(vocab_size, 4.25),
        "two values": np.where(rng.random(vocab_size) < 0.2, 1.0, 0.0),
        "banned": banned,
        "alone": alone,
        "huge": normal * 1e37,
        "tiny": normal * 1e-30,
        "large offset": np.round(normal) + 1e6,
        "one above": np.eye(1, vocab_size)[0] * 100,
        "sorted": np.sort(normal),
    }
    return {name: row.astype(np.float32) for name, row in rows.items()}


def require_distribution(found: Floats, logits: Floats, params: SamplingParams) -> None:
    """``found`` is what the plain implementation says; what is within rounding of a limit may fall on either side."""
    assert found.dtype == np.float32
    assert found.sum(dtype=np.float64) == pytest.approx(1, abs=1e-5)
    slack = 2e-6 if params.top_p < 1 else 0.0
    fewer = replace(params, top_p=max(params.top_p - slack, 1e-15))
    more = replace(params, top_p=min(params.top_p + slack, 1.0))
    kept = found > 0
    assert kept[exact_probabilities(logits, fewer) > 1e-30].all()
    assert (exact_probabilities(logits, more, tie=1e-6)[kept] > 0).all()
    whole = exact_probabilities(logits, SamplingParams(params.temperature))
    np.testing.assert_allclose(found[kept], (whole / whole[kept].sum())[kept], rtol=3e-4, atol=1e-37)


@pytest.mark.parametrize("params", SETTINGS, ids=named)
@pytest.mark.parametrize("vocab_size", [1, 2, 7, 1000, 20_000])
def test_probabilities_are_those_of_a_plain_implementation(vocab_size: int, params: SamplingParams) -> None:
    for name, logits in rows_of(vocab_size).items():
        with np.errstate(invalid="raise", divide="raise", over="ignore"):
            found = probabilities(logits, params)
        try:
            require_distribution(found, logits, params)
        except AssertionError as error:
            raise AssertionError(f"row {name!r}: {error}") from error


@pytest.mark.parametrize(
    "name, params", [("normal", SamplingParams(1.0, 0, 0.999)), ("ties", SamplingParams(0.8, 40, 0.9))]
)
def test_probabilities_of_a_large_vocabulary(name: str, params: SamplingParams) -> None:
    logits = rows_of(262_144)[name]
    require_distribution(probabilities(logits, params), logits, params)


@pytest.mark.parametrize("vocab_size", [1, 7, 1000, 20_000])
@pytest.mark.parametrize("top", [0, 1, 5, 20])
def test_log_probabilities_are_those_of_a_plain_implementation(vocab_size: int, top: int) -> None:
    for name, logits in rows_of(vocab_size).items():
        exact, token = exact_probabilities(logits, SamplingParams(1.0)), vocab_size // 2
        found = log_probability(logits, token, top)
        # Of equal logits the smaller id comes first; impossible tokens are not among the likeliest.
        order = [v for v in np.argsort(-logits, kind="stable")[:top] if logits[v] > -INF]
        assert [v for v, _ in found.top] == order, name
        values = {token: found.logprob, **dict(found.top)}
        likely = [v for v in values if exact[v] > 0]
        np.testing.assert_allclose(
            [values[v] for v in likely], np.log(exact[likely]), rtol=1e-6, atol=1e-5, err_msg=name
        )


@pytest.mark.parametrize("params", SETTINGS, ids=named)
def test_logits_stay_as_they_are(params: SamplingParams) -> None:
    for logits in rows_of(31).values():
        before = logits.copy()
        probabilities(logits, params)
        np.testing.assert_array_equal(logits, before)


def test_top_k_and_top_p_by_hand() -> None:
    logits = np.log(np.array([0.1, 0.4, 0.2, 0.3], np.float32))
    cases: list[tuple[int, float, list[float]]] = [
        (0, 1.0, [0.1, 0.4, 0.2, 0.3]),
        (2, 1.0, [0, 4 / 7, 0, 3 / 7]),
        (1, 1.0, [0, 1, 0, 0]),
        (0, 0.39, [0, 1, 0, 0]),
        (0, 0.41, [0, 4 / 7, 0, 3 / 7]),
        (0, 0.95, [0.1, 0.4, 0.2, 0.3]),
        # Top-p counts the mass that top-k left: 4/9 and 3/9 reach 0.75 together.
        (3, 0.75, [0, 4 / 7, 0, 3 / 7]),
        (3, 0.80, [0, 4 / 9, 2 / 9, 3 / 9]),
    ]
    for top_k, top_p, expected in cases:
        found = probabilities(logits, SamplingParams(1.0, top_k, top_p))
        np.testing.assert_allclose(found, expected, rtol=1e-6, err_msg=f"top_k {top_k}, top_p {top_p}")


def test_min_p_keeps_what_is_nearly_as_likely_as_the_best() -> None:
    logits = np.log(np.array([0.5, 0.25, 0.2, 0.05], np.float32))
    for min_p, top_k, kept in [(0.6, 0, 1), (0.45, 0, 2), (0.3, 0, 3), (0.05, 0, 4), (0.3, 2, 2), (1.0, 0, 1)]:
        found = probabilities(logits, SamplingParams(1.0, top_k, min_p=min_p))
        expected = np.array([0.5, 0.25, 0.2, 0.05]) * (np.arange(4) < kept)
        np.testing.assert_allclose(found, expected / expected.sum(), rtol=1e-6)


def test_greedy_is_one_hot_at_the_first_largest_logit() -> None:
    for logits, best in [([0, 5, 5, -INF], 1), ([-INF, -INF, -INF, -3], 3)]:
        row = np.array(logits, np.float32)
        np.testing.assert_array_equal(probabilities(row, SamplingParams()), np.arange(4) == best)
        assert sample(row, SamplingParams(), 0) == best


@pytest.mark.parametrize(
    "key, counter, words",
    [
        ((0, 0), (0, 0, 0, 0), "16554d9eca36314c db20fe9d672d0fdc d7e772cee186176b 7e68b68aec7ba23b"),
        (
            (0x452821E638D01377, 0xBE5466CF34E90C6C),
            (0x243F6A8885A308D3, 0x13198A2E03707344, 0xA4093822299F31D0, 0x082EFA98EC4E6C89),
            "a528f45403e61d95 38c72dbd566e9788 a5a1610e72fd18b5 57bd43b5e52b7fe6",
        ),
    ],
)
def test_the_reference_philox_gives_random123s_known_answers(
    key: tuple[int, int], counter: tuple[int, int, int, int], words: str
) -> None:
    assert " ".join(f"{word:016x}" for word in philox(key, counter)) == words


PLACES = [
    (0, Purpose.TARGET, 0),
    (1, Purpose.DRAFT, 0),
    (7, Purpose.ACCEPT, 12345),
    ((1 << 64) - 1, Purpose.TARGET, (1 << 40) + 3),
    ((1 << 63) + 5, Purpose.DRAFT, 131_072),
]


@pytest.mark.parametrize("seed, purpose, position", PLACES)
def test_random_numbers_are_philox_of_seed_purpose_position(seed: int, purpose: Purpose, position: int) -> None:
    size = 23
    blocks = (philox((seed, purpose), (block, position, 0, 0)) for block in itertools.count(1))
    words = list(itertools.islice(itertools.chain.from_iterable(blocks), size))
    halves = [half for word in words for half in (word & 0xFFFFFFFF, word >> 32)][:size]
    expected = (np.array(halves) + 0.5) / 2**32
    found = exponential_noise(seed, purpose, position, size)
    assert found.dtype == np.float32
    np.testing.assert_allclose(-np.expm1(-found.astype(np.float64)), expected, rtol=2e-7, atol=6e-8)
    assert uniform(seed, purpose, position) == (words[0] >> 11) / 2**53


@pytest.mark.parametrize("seed, purpose, position", PLACES)
def test_fewer_exponentials_are_a_prefix_of_more(seed: int, purpose: Purpose, position: int) -> None:
    many = exponential_noise(seed, purpose, position, 4099)
    assert len(many) == 4099
    for size in (0, 1, 2, 3, 7, 8, 9, 4098):
        np.testing.assert_array_equal(exponential_noise(seed, purpose, position, size), many[:size])


def test_exponentials_are_exponential() -> None:
    many = np.stack([exponential_noise(5, Purpose.TARGET, position, 1000) for position in range(1000)]).astype(
        np.float64
    )
    assert many.min() > 0
    assert many.mean() == pytest.approx(1, abs=5e-3)
    assert many.var() == pytest.approx(1, abs=2e-2)
    assert stats.kstest(many.ravel(), "expon").pvalue > 1e-6
    for axis in (0, 1):  # Neither neighbouring tokens nor neighbouring positions are correlated.
        here, there = np.moveaxis(many, axis, 0)[:-1], np.moveaxis(many, axis, 0)[1:]
        assert abs(np.corrcoef(here.ravel(), there.ravel())[0, 1]) < 5e-3


def test_the_smallest_and_largest_words_give_finite_exponentials() -> None:
    # Two words among 10**8, found by search: 12, and 2**32 - 4, whose uniform rounds up to 1 in float32.
    assert exponential_noise(0, Purpose.TARGET, 5, 40_457)[-1] == pytest.approx(12.5 / 2**32, rel=1e-6)
    assert exponential_noise(0, Purpose.TARGET, 197, 11_215)[-1] == pytest.approx(24 * math.log(2), rel=1e-6)


def test_different_seeds_purposes_and_positions_are_independent() -> None:
    places = [(seed, purpose, position) for seed in range(3) for purpose in Purpose for position in range(3)]
    noise = [exponential_noise(*place, 20_000) for place in places]
    for (a, x), (b, y) in itertools.combinations(zip(places, noise, strict=True), 2):
        assert abs(np.corrcoef(x, y)[0, 1]) < 0.04, (a, b)


def test_uniforms_are_uniform() -> None:
    many = [uniform(3, Purpose.ACCEPT, position) for position in range(20_000)]
    assert min(many) >= 0
    assert max(many) < 1
    assert stats.kstest(many, "uniform").pvalue > 1e-6


def test_a_race_draws_from_its_distribution_at_any_scale() -> None:
    rng = np.random.default_rng(1)
    probs = rng.dirichlet(np.full(50, 0.3))
    probs[7] = 0
    probs /= probs.sum()
    draws = [exponential_noise(11, Purpose.TARGET, position, 50) for position in range(40_000)]
    for scale in (1.0, 1e-20):
        weights = (probs * scale).astype(np.float32)
        fit = chi_squared([gumbel_argmax(weights, noise) for noise in draws], probs)
        assert fit.good, fit


def test_two_distributions_that_race_against_the_same_noise_agree_as_often_as_theory_says() -> None:
    rng = np.random.default_rng(2)
    p, q = rng.dirichlet(np.ones(20), 2).astype(np.float32)
    count = 20_000
    draws = [exponential_noise(4, Purpose.TARGET, position, 20) for position in range(count)]
    rate = sum(gumbel_argmax(p, noise) == gumbel_argmax(q, noise) for noise in draws) / count
    expected = sum(1 / np.maximum(p / p[i], q / q[i]).sum() for i in range(20))
    assert rate == pytest.approx(expected, abs=4 * math.sqrt(expected * (1 - expected) / count))


def test_a_choice_depends_on_its_position_and_nothing_else() -> None:
    logits = np.random.default_rng(3).normal(size=(6, 300)).astype(np.float32)
    params = SamplingParams(1.0, 0, 0.95, seed=9)

    def tokens(first: int, params: SamplingParams = params, purpose: Purpose = Purpose.TARGET) -> list[int]:
        return [sample(row, params, first + i, purpose) for i, row in enumerate(logits)]

    found = tokens(40)
    assert found == tokens(40)
    assert found != tokens(41)
    assert found != tokens(40, SamplingParams(1.0, 0, 0.95, seed=10))
    assert found != tokens(40, purpose=Purpose.DRAFT)
    wider = np.pad(logits, ((0, 0), (0, 77)), constant_values=-INF)
    assert found == [sample(row, params, 40 + i) for i, row in enumerate(wider)]


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(0.7, 3, 0.9)], ids=["greedy", "sampled"])
@pytest.mark.parametrize("bad", [math.nan, INF])
def test_logits_that_are_not_numbers_are_an_error(params: SamplingParams, bad: float) -> None:
    with pytest.raises(BackendError, match="not numbers"):
        sample(np.array([1, bad, 2], np.float32), params, 3)
    with pytest.raises(BackendError, match="not numbers"):
        probabilities(np.full(3, -INF, np.float32), params)


@pytest.mark.parametrize(
    "name, value",
    [
        ("temperature", -0.1),
        ("temperature", INF),
        ("temperature", math.nan),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", -0.5),
        ("top_p", 1.0001),
        ("top_p", math.nan),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("min_p", math.nan),
        ("seed", -1),
        ("seed", 1 << 64),
    ],
)
def test_a_meaningless_parameter_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(RequestError, match=rf"^{name} .*: expected ") as caught:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "temperature",
    [
        0.0,
        1e-30,
        1e30,
        1e-50,
        1e300,
    ],
)
def test_the_limits_of_every_parameter_work(temperature: float) -> None:
    logits = np.array([0, 1, -INF], np.float32)
    for top_k, top_p, seed in [(0, 1.0, 0), (3, 5e-324, (1 << 64) - 1), (1 << 70, 1 - 2**-53, 1)]:
        params = SamplingParams(temperature, top_k, top_p, seed)
        with np.errstate(invalid="raise"):
            token = sample(logits, params, (1 << 63) - 1)
        assert token == 1 or (token == 0 and temperature > 1)
