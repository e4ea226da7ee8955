"""Samplers that llama.cpp has too: by their definitions, and exact through the real loop, drafts included."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from specrun.decoder import SpeculativeDecoder
from specrun.errors import RequestError
from specrun.request.factory import RequestFactory
from specrun.request.options import RequestOptions
from specrun.request.request import Request
from specrun.sampling.penalties import TokenCounts, apply_penalties, repetition_lengths
from specrun.sampling.sampler import Floats, Purpose, SamplingParams, probabilities, sample, uniform
from tests.helpers.reference import Doubles, Fit, chi_squared
from tests.helpers.tables import decode, make_requests, normal, open_tables, table_config

SIGMA, TYPICAL = SamplingParams(1.3, top_n_sigma=0.9), SamplingParams(0.9, typical_p=0.7)
XTC = SamplingParams(1.0, xtc_probability=0.5, xtc_threshold=0.15)
ALL = SamplingParams(1.1, top_k=7, top_n_sigma=1.8, typical_p=0.9, top_p=0.97, xtc_probability=0.4, xtc_threshold=0.12)
DRAWN = pytest.mark.parametrize("params", [SIGMA, TYPICAL, XTC, ALL], ids=["sigma", "typical", "xtc", "all"])


def plainly(logits: Sequence[float], params: SamplingParams, takes_away: bool) -> Doubles:
    """The definitions, token by token, in doubles."""
    largest, tokens = max(logits), range(len(logits))
    probs = [math.exp((logit - largest) / params.temperature) for logit in logits]

    def keep(kept: Sequence[int]) -> None:
        mass = math.fsum(probs[token] for token in kept)
        probs[:] = [probs[token] / mass if token in kept else 0.0 for token in tokens]

    def first_of_mass(order: Sequence[int], mass: float) -> Sequence[int]:
        return order[: next((n for n in tokens if math.fsum(probs[t] for t in order[:n]) >= mass), len(order))]

    if params.top_n_sigma:
        mean = math.fsum(logits) / len(logits)
        sigma = math.sqrt(math.fsum((logit - mean) ** 2 for logit in logits) / len(logits))
        keep([token for token in tokens if logits[token] >= largest - params.top_n_sigma * sigma])
    if params.top_k:
        keep(sorted(tokens, key=lambda token: -probs[token])[: params.top_k])
    keep([token for token in tokens if probs[token]])
    if params.typical_p < 1:
        entropy = -math.fsum(p * math.log(p) for p in probs if p)
        possible = [token for token in tokens if probs[token]]
        order = sorted(possible, key=lambda token: abs(-math.log(probs[token]) - entropy))
        keep(first_of_mass(order, params.typical_p))
    if params.top_p < 1:
        keep(first_of_mass(sorted(tokens, key=lambda token: -probs[token]), params.top_p))
    if takes_away:
        reaching = sorted((token for token in tokens if probs[token] >= params.xtc_threshold), key=probs.__getitem__)
        keep([token for token in tokens if probs[token] and token not in reaching[1:]])
    return np.array(probs)


@DRAWN
def test_the_definitions(params: SamplingParams) -> None:
    changed = 0
    for seed in range(200):
        logits = normal(seed, 12, scale=1.5)
        for chance in (0.0, 1.0) if params.xtc_probability else (0.0,):
            found = probabilities(logits, replace(params, xtc_probability=chance))
            np.testing.assert_allclose(found, plainly(logits.tolist(), params, bool(chance)), rtol=1e-4, atol=1e-7)
            plain = probabilities(logits, SamplingParams(params.temperature, params.top_k, params.top_p))
            changed += not np.allclose(found, plain, atol=1e-3)
    assert changed > 100


def test_what_is_impossible_and_ties() -> None:
    logits = np.array([-np.inf, 1, 1, 0, -np.inf, -1], np.float32)
    assert np.flatnonzero(probabilities(logits, SamplingParams(1.0, top_n_sigma=0.1))).tolist() == [1, 2]
    assert np.flatnonzero(probabilities(logits, SamplingParams(1.0, typical_p=0.01))).tolist() == [1, 2]
    always = SamplingParams(1.0, xtc_probability=1, xtc_threshold=0.3)
    assert np.flatnonzero(probabilities(logits, always)).tolist() == [1, 2, 3, 5], "equals are all the least likely"
    assert np.flatnonzero(probabilities(logits, replace(always, xtc_threshold=0.1))).tolist() == [3, 5]
    alone = np.array([0, -np.inf], np.float32)
    for params in (
        replace(always, xtc_threshold=0.0),
        replace(SIGMA, top_n_sigma=1e-9),
        replace(TYPICAL, typical_p=1e-9),
    ):
        assert probabilities(alone, params).tolist() == [1, 0]


def test_xtc_is_decided_by_seed_and_position_and_must_be() -> None:
    params = replace(XTC, seed=5)
    decided = [params.at(position).xtc_probability for position in range(400)]
    assert decided == [float(uniform(5, Purpose.XTC, position) < 0.5) for position in range(400)]
    assert 150 < sum(decided) < 250
    assert decided != [replace(params, seed=6).at(position).xtc_probability for position in range(400)]
    with pytest.raises(ValueError, match="not decided"):
        probabilities(normal(1, 4), params)
    assert sample(np.array([1, 2], np.float32), SamplingParams(xtc_probability=0.5), 3) == 1, "greedy texts have none"


# --- texts


def alone(table: Floats, request: Request) -> list[int]:
    """What the target alone chooses, without engine, cache and drafts; penalties by their definitions."""
    tokens = list(request.prompt)
    while len(tokens) < len(request.prompt) + request.max_output_len:
        row = table[(tokens[-1] + 3 * tokens[-2]) % len(table)]
        row = penalized(row, request.params, tokens, request.breakers)
        tokens.append(sample(row, request.params, len(tokens)))
    return tokens[len(request.prompt) :]


def repetition(text: Sequence[int], token: int, breakers: frozenset[int]) -> int:
    """The longest end of ``text`` that stands before ``token`` earlier in it, without a breaker."""
    if token in breakers:
        return 0
    found = 0
    for place in (place for place, other in enumerate(text) if other == token):
        length = 0
        while length < place and text[place - 1 - length] == text[-1 - length] and text[-1 - length] not in breakers:
            length += 1
        found = max(found, length)
    return found


def penalized(logits: Floats, params: SamplingParams, text: Sequence[int], breakers: frozenset[int]) -> Floats:
    found = logits.copy()
    recent = text if params.repeat_last_n < 0 else text[max(0, len(text) - params.repeat_last_n) :]
    for token in range(len(found)):
        if token in recent:
            factor = np.float32(params.repetition_penalty)
            found[token] = found[token] / factor if found[token] > 0 else found[token] * factor
        if (beyond := repetition(text, token, breakers) - params.dry_allowed_length) >= 0:
            found[token] -= np.float32(min(1000, params.dry_multiplier * params.dry_base**beyond))
    return found


DRY = SamplingParams(dry_multiplier=0.8, dry_allowed_length=1)
WINDOW = SamplingParams(repetition_penalty=1.7, repeat_last_n=4)
PENALIZED = pytest.mark.parametrize(
    "params",
    [
        *(DRY, WINDOW, replace(WINDOW, repeat_last_n=0)),
        *(replace(DRY, dry_base=3.0, dry_allowed_length=3), replace(DRY, repetition_penalty=1.2)),
    ],
    ids=["dry", "window", "no window", "longer", "both"],
)  # fmt: skip


@PENALIZED
def test_the_penalties_definitions(params: SamplingParams) -> None:
    generator, breakers, longest = np.random.default_rng(1), frozenset({3, 99}), 0
    for _ in range(200):
        text = generator.choice([0, 0, 0, 1, 1, 2, 3, 4], generator.integers(1, 40)).tolist()
        logits = generator.normal(size=4).astype(np.float32)  # Ids of the text go beyond the model's.
        counts = functools.reduce(TokenCounts.add, text[2:], TokenCounts.of(text[:2], breakers))
        found = apply_penalties(logits, params, counts)
        np.testing.assert_allclose(found, penalized(logits, params, text, breakers), rtol=1e-5, atol=1e-6)
        lengths = repetition_lengths(counts, params.dry_allowed_length, 4)
        assert lengths.tolist() == [repetition(text, token, breakers) for token in range(4)]
        longest = max(longest, *lengths)
    assert longest > 3


def test_a_repetition_without_end_is_counted_to_an_end() -> None:
    counts = TokenCounts.of([7] * 3000)
    assert repetition_lengths(counts, 2, 8).tolist() == [0] * 7 + [52]
    found = apply_penalties(np.zeros(8, np.float32), SamplingParams(dry_multiplier=1.0, dry_base=100.0), counts)
    assert found.tolist() == [0] * 7 + [-1000]


@pytest.mark.parametrize("draft_len", [1, 4])
@pytest.mark.parametrize("params", [SIGMA, TYPICAL, XTC, ALL, DRY, WINDOW, replace(ALL, dry_multiplier=1.5)], ids=str)
def test_accepting_tokens_gives_the_targets_own_text(tmp_path: Path, params: SamplingParams, draft_len: int) -> None:
    target = normal(1, 30, 30, scale=1.5)
    decoder = open_tables(tmp_path, target, target + normal(2, 30, 30, scale=0.5), draft_len=draft_len, weight=3)
    requests = [Request([4, 7, seed], replace(params, seed=seed), 40, breakers=frozenset({5})) for seed in range(4)]
    assert decode(decoder, requests) == [alone(target, request) for request in requests]
    assert sum(request.stats.accepted for request in requests) > 20


def joint(target: Floats, params: SamplingParams) -> Doubles:
    """Probability of every text of three tokens after the prompt [0]."""
    chance, found = params.xtc_probability, []
    for text in itertools.product(range(len(target)), repeat=3):
        chances = []
        for at, token in enumerate(text):
            logits = penalized(target, params, [0, *text[:at]], frozenset()).tolist()
            with_xtc = plainly(logits, params, True)[token] if chance else 0.0
            chances.append(chance * with_xtc + (1 - chance) * plainly(logits, params, False)[token])
        found.append(math.prod(chances))
    return np.array(found)


def draw(tmp_path: Path, params: SamplingParams) -> Fit:
    """Texts of three tokens by rejection sampling, against what the target writes with probability."""
    target = normal(3, 6, scale=0.5)
    decoder = open_tables(tmp_path, target, target + normal(4, 6, scale=0.5), draft_len=2, use_logits=True)
    texts = decode(decoder, make_requests(2500, 3, params))
    return chi_squared([int("".join(map(str, text)), 6) for text in texts], joint(target, params))


@pytest.mark.quick("xtc dry")
@pytest.mark.parametrize(
    "params",
    [
        ALL,
        replace(XTC, dry_multiplier=0.7, dry_allowed_length=1),
        replace(TYPICAL, repetition_penalty=2.0, repeat_last_n=1),
    ],
    ids=["all", "xtc dry", "typical window"],
)  # fmt: skip
def test_rejection_sampling_keeps_the_distribution(tmp_path: Path, params: SamplingParams) -> None:
    fit = draw(tmp_path, params)
    assert fit.good, fit
    assert fit.freedom > 10


def test_control_xtc_that_is_decided_once_for_a_text_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = SamplingParams.at
    monkeypatch.setattr(SamplingParams, "at", lambda self, _position: right(self, 0))
    assert not draw(tmp_path, XTC).good


# --- who may ask


@pytest.mark.parametrize(
    ("params", "name"),
    [
        (SIGMA, "top_n_sigma"), (TYPICAL, "typical_p"), (XTC, "xtc_probability"), (DRY, "dry_multiplier"),
        (WINDOW, "repeat_last_n"), (replace(ALL, temperature=0), None), (replace(DRY, dry_multiplier=0), None),
    ],
)  # fmt: skip
def test_gpus_refuse_by_name(params: SamplingParams, name: str | None) -> None:
    config = table_config(8)
    on_gpu = config.model_copy(update={"backend": config.backend.model_copy(update={"device": "cuda"})})
    for target in (config, on_gpu):
        factory = RequestFactory(target, 4, None)
        if name is None or target is config:
            factory.requests([1], params, RequestOptions())
            continue
        with pytest.raises(RequestError, match=f"^{name}: only a target on the CPU has it") as raised:
            factory.requests([1], params, RequestOptions())
        assert raised.value.param == name


def test_breakers_are_the_tokens_that_hold_a_text(engines: Path) -> None:
    with SpeculativeDecoder.open(engines / "target") as decoder:
        tokenizer = decoder.tokenizer
        asked = decoder.request("the quick", dry_multiplier=1.0, dry_sequence_breakers=["q", ":"])
        expected = {number for piece, number in tokenizer.get_vocab().items() if "q" in piece or ":" in piece}
        assert asked.breakers == expected and len(expected) > 1
        assert decoder.request("the quick", dry_multiplier=1.0).breakers != expected
        assert not decoder.request("the quick", dry_sequence_breakers=["q"]).breakers, "nobody asks"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("top_n_sigma", -1), ("top_n_sigma", math.inf), ("typical_p", 0), ("typical_p", 1.1), ("xtc_probability", 2),
        ("xtc_threshold", -0.1), ("dry_multiplier", -1), ("dry_multiplier", math.nan), ("dry_base", 0.9),
        ("dry_allowed_length", 0), ("dry_sequence_breakers", ["x"] * 17), ("dry_sequence_breakers", [1]),
        ("repeat_last_n", -2),
    ],
)  # fmt: skip
def test_a_meaningless_parameter_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(RequestError, match=rf"^{name} .*: expected ") as raised:
        SamplingParams(**{name: value})  # type: ignore[arg-type]
    assert raised.value.param == name
