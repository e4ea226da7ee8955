"""What a request may ask for: refused before anything runs with the parameter's name, or done as documented."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specrun.decoder import SpeculativeDecoder
from specrun.errors import RequestError
from specrun.output import as_json
from specrun.request import Request
from specrun.sampling import SamplingParams
from tests.tables import normal, open_tables

V = 20
TABLE = normal(1, V, V)


@pytest.fixture
def decoder(tmp_path: Path) -> SpeculativeDecoder:
    return open_tables(tmp_path, TABLE, TABLE + normal(2, V, V), draft_len=3, max_input_len=30)


@pytest.mark.parametrize(
    "options",
    [
        {"max_output_len": 0},
        {"max_output_len": 5000},
        {"min_output_len": -1},
        {"min_output_len": 9, "max_output_len": 8},
        {"stop_ids": [V]},
        {"stop_ids": [-1]},
        {"draft_len": 4},
        {"draft_len": -1},
        {"acceptance": "hope"},
        {"logprobs": 21},
        {"logprobs": -1},
        {"timeout": 0},
        {"echo": True},
        {"chat": True},
        {"stop": ["x"]},
    ],
    ids=str,
)
def test_refused_by_name(decoder: SpeculativeDecoder, options: dict[str, Any]) -> None:
    name = "token ids" if options.keys() & {"echo", "chat", "stop"} else next(iter(options))
    with pytest.raises(RequestError, match=name):
        decoder.request([1, 2], **options)


@pytest.mark.parametrize(
    "params",
    [
        {"top_p": 0},
        {"temperature": -1},
        {"temperature": math.nan},
        {"min_p": 2},
        {"repetition_penalty": 0},
        {"repetition_penalty": 1e-300},
        {"presence_penalty": -1e300},
        {"logit_bias": {0: 1e39}},
        {"presence_penalty": math.inf},
        {"frequency_penalty": math.nan},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {V: 1.0}},
        {"logit_bias": {0: math.inf}},
        {"logit_bias": dict.fromkeys(range(301), 1.0)},
        {"seed": -1},
    ],
    ids=str,
)
def test_sampling_refused_by_name(decoder: SpeculativeDecoder, params: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(params))):
        decoder.request([1], SamplingParams(**params))


def test_a_bad_prompt_fails_alone(decoder: SpeculativeDecoder) -> None:
    prompts = [[1, 2], [], [3] * 31, [V], [4, 5]]
    found = decoder.generate(prompts, max_output_len=6)
    assert [request.finish_reason for request in found] == ["length", "error", "error", "error", "length"]
    assert [str(request.error).split(":")[0] for request in found[1:4]] == ["prompt 2", "prompt 3", "prompt 4"]
    assert found[4].output == decoder.generate([[4, 5]], max_output_len=6)[0].output
    with pytest.raises(RequestError, match="prompt 1: empty"):
        decoder.generate([[], [V]])


@pytest.mark.parametrize("acceptance", ["tokens", "logits"])
def test_log_probabilities_are_the_targets_own(decoder: SpeculativeDecoder, acceptance: Any) -> None:
    params = SamplingParams(0.7, top_k=5, repetition_penalty=1.2, logit_bias={3: 1.0}, seed=4)
    pieces = list(decoder.stream([1], params, acceptance=acceptance, max_output_len=40, logprobs=3))
    assert {piece.from_draft for piece in pieces} == {False, True}
    last = 1
    for piece in pieces:
        row = TABLE[last].astype(np.float64)
        expected = row - np.log(np.exp(row).sum())
        best = np.argsort(-row)[:3]
        assert piece.logprob
        assert piece.logprob.logprob == pytest.approx(expected[piece.token], abs=1e-6)
        assert [token for token, _ in piece.logprob.top] == best.tolist()
        assert [value for _, value in piece.logprob.top] == pytest.approx(expected[best], abs=1e-6)
        last = piece.token
    assert all(piece.logprob is None for piece in decoder.stream([1], max_output_len=4))
    (own,) = decoder.stream([1], max_output_len=1, logprobs=0)
    assert own.logprob
    assert own.logprob.top == []


def test_prompts_that_are_no_prompts(decoder: SpeculativeDecoder) -> None:
    for bad in ([-1, 3], [-(10**19), 1], [V], [1.5, 2], [None]):
        with pytest.raises(RequestError, match=r"token id|a prompt is"):
            decoder.request(bad)
    assert list(decoder.request(np.array([3, 4])).prompt) == [3, 4]
    with pytest.raises(RequestError, match="system"):
        decoder.request([1], system="be brief")


def test_impossible_tokens_are_not_among_the_likeliest(tmp_path: Path) -> None:
    table = normal(3, 6, 6)
    table[:, 4:] = -np.inf
    decoder = open_tables(tmp_path, table)
    (request,) = decoder.generate([[1]], max_output_len=5, logprobs=20)
    line = json.loads(as_json(request), parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert [len(found["top"]) for found in line["logprobs"]] == [4] * 5


def test_stop_ids_end_the_text(decoder: SpeculativeDecoder) -> None:
    (long,) = decoder.generate([[1]], max_output_len=30)
    stop = long.output[7]
    (short,) = decoder.generate([[1]], max_output_len=30, stop_ids=[stop])
    assert short.output == long.output[: long.output.index(stop) + 1]
    assert short.finish_reason == "stop"


def test_acceptance_of_one_request(decoder: SpeculativeDecoder) -> None:
    """The two ways draw differently, so that the same seed shows which one it was."""
    params = SamplingParams(1.0, seed=2)
    tokens, logits, default = (
        decoder.generate([[1]], params, max_output_len=40, acceptance=way)[0].output
        for way in ("tokens", "logits", None)
    )
    assert tokens == default != logits
    (alone,) = decoder.generate([[1]], params, max_output_len=40, draft_len=0)
    assert alone.output == tokens
    assert alone.stats.drafted == 0
    assert isinstance(alone, Request)
