"""Penalties, biases and forbidden tokens: the formulas, and exactness through the real loop, drafts included."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from specrun.request.options import RequestOptions
from specrun.request.request import Request
from specrun.sampling.penalties import TokenCounts, apply_penalties
from specrun.sampling.sampler import Floats, SamplingParams
from tests.helpers.reference import Doubles, Fit, chi_squared, exact_probabilities
from tests.helpers.tables import decode, make_requests, normal, open_tables

ALL = SamplingParams(
    repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=-0.25, logit_bias={0: 2.0, 5: -math.inf, 99: 1.0}
)


def plainly(logits: npt.ArrayLike, params: SamplingParams, prompt: Sequence[int], output: Sequence[int]) -> Doubles:
    """The definitions, token by token."""
    found = np.array(logits, np.float64)
    for token in range(len(found)):
        if token in prompt or token in output:
            factor = params.repetition_penalty
            found[token] = found[token] / factor if found[token] > 0 else found[token] * factor
        if token in output:
            found[token] -= params.presence_penalty + params.frequency_penalty * list(output).count(token)
        found[token] += params.logit_bias.get(token, 0.0)
    return found


@pytest.mark.parametrize(
    "params",
    [
        ALL,
        SamplingParams(repetition_penalty=0.5),
        SamplingParams(presence_penalty=2),
        SamplingParams(logit_bias={3: 9}),
    ],
)
def test_the_definitions(params: SamplingParams) -> None:
    generator = np.random.default_rng(1)
    for _ in range(200):
        prompt, output = (generator.integers(0, 12, generator.integers(0, 9)).tolist() for _ in range(2))
        logits = generator.normal(size=10).astype(np.float32)  # Ids of the text go beyond the model's.
        before = logits.copy()
        found = apply_penalties(
            logits, params, functools.reduce(TokenCounts.add, output, TokenCounts.of(prompt)), forbidden=(2, 11)
        )
        expected = plainly(logits, params, prompt, output)
        expected[2] = -np.inf
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(logits, before)


@pytest.mark.parametrize("draft_len", [1, 4, 10])
def test_greedy_is_the_target_alone_with_penalties(tmp_path: Path, draft_len: int) -> None:
    target = normal(1, 30, 30, scale=2.0)
    decoder = open_tables(tmp_path, target, target + normal(2, 30, 30), draft_len=draft_len, weight=3)
    for params in (ALL, SamplingParams(repetition_penalty=1.5), SamplingParams(frequency_penalty=0.4)):
        request = Request([4, 7], params, 50)
        decode(decoder, [request])
        tokens = [4, 7]
        while len(tokens) < 52:
            row = target[(tokens[-1] + 3 * tokens[-2]) % 30]
            tokens.append(int(plainly(row, params, tokens[:2], tokens[2:]).argmax()))
        assert request.tokens == tokens
        assert request.stats.accepted > 0


def joint(target: Floats, params: SamplingParams, length: int) -> Doubles:
    """Probability of every text of ``length`` tokens after the prompt [0]."""
    found = []
    for text in itertools.product(range(len(target)), repeat=length):
        chances = []
        for at, token in enumerate(text):
            logits = plainly(target, params, [0], text[:at])
            chances.append(exact_probabilities(logits, params)[token])
        found.append(math.prod(chances))
    return np.array(found)


def draw(tmp_path: Path, use_logits: bool, params: SamplingParams, count: int = 6000) -> Fit:
    """Texts of four tokens, most of them drafted, against what the target writes with probability."""
    target = normal(3, 6)
    decoder = open_tables(tmp_path, target, target + normal(4, 6), draft_len=3, use_logits=use_logits)
    texts = decode(decoder, make_requests(count, 4, params))
    numbers = [int("".join(map(str, text)), 6) for text in texts]
    return chi_squared(numbers, joint(target, params, 4))


WARM = SamplingParams(1.0, repetition_penalty=1.6, presence_penalty=0.8, frequency_penalty=0.5, logit_bias={2: 0.7})
BOTH = pytest.mark.parametrize("use_logits", [False, True], ids=["tokens", "logits"])


@pytest.mark.quick("all-logits")
@BOTH
@pytest.mark.parametrize("params", [WARM, replace(WARM, top_k=4, top_p=0.9)], ids=["all", "top"])
def test_sampling_is_exact_with_penalties(tmp_path: Path, params: SamplingParams, use_logits: bool) -> None:
    fit = draw(tmp_path, use_logits, params)
    print(fit)
    assert fit.good
    assert fit.freedom > 50


@pytest.mark.quick("tokens")
@BOTH
def test_control_penalties_that_do_not_know_the_drafts_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use_logits: bool
) -> None:
    right = Request.apply_penalties

    def committed_only(self: Request, logits: Floats, drafts: Sequence[int]) -> Floats:
        return right(self, logits, ())

    monkeypatch.setattr(Request, "apply_penalties", committed_only)
    assert not draw(tmp_path, use_logits, WARM).good


def test_no_end_before_the_shortest_output(tmp_path: Path) -> None:
    decoder = open_tables(tmp_path, table := normal(5, 12, 12), table + normal(6, 12, 12))
    stop = {int(row.argmax()) for row in table}
    free = Request([1], SamplingParams(), 30, frozenset(stop))
    long = Request([1], SamplingParams(), 30, frozenset(stop), options=RequestOptions(min_output_len=9))
    decode(decoder, [free, long])
    assert (len(free.output), free.finish_reason) == (1, "stop")
    assert (len(long.output), long.finish_reason) == (10, "stop")
    assert not stop & set(long.output[:9])
