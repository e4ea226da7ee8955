"""What a request may ask for: refused before anything runs with the parameter's name, or done as documented."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.errors import RequestError, SpecError
from specrun.output import as_json
from specrun.request.options import RequestOptions
from specrun.request.request import Request
from specrun.sampling.sampler import SamplingParams
from specrun.text.detokenizer import TextStream
from tests.helpers.tables import decode, normal, open_tables

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
    with pytest.raises(RequestError) as raised:
        decoder.request([1, 2], **options)
    assert raised.value.param == ("prompt" if options == {"max_output_len": 5000} else next(iter(options)))
    assert ("token ids" in str(raised.value)) == bool(options.keys() & {"echo", "chat", "stop"})


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


@pytest.mark.parametrize(
    ("options", "same"),
    [
        ({"max_output_len": 6.0}, {"max_output_len": 6}),
        ({"max_output_len": np.int16(6), "min_output_len": 2.0}, {"max_output_len": 6, "min_output_len": 2}),
        ({"logprobs": 2.0}, {"logprobs": 2}),
        ({"stop_ids": np.array([3, 4])}, {"stop_ids": [3, 4]}),
        ({"stop_ids": [3.0]}, {"stop_ids": [3]}),
        ({"draft_len": 2.0}, {"draft_len": 2}),
        ({"draft_len": "auto"}, {"draft_len": None}),
        ({"timeout": 60}, {"timeout": 60.0}),
    ],
    ids=str,
)
def test_whole_numbers_are_taken_however_they_are_written(
    decoder: SpeculativeDecoder, options: dict[str, Any], same: dict[str, Any]
) -> None:
    numbers: dict[str, Any] = {"top_k": 5.0, "seed": np.int64(3), "logit_bias": {2.0: 1, np.int32(3): np.float32(0.5)}}
    prompts: list[Any] = [[1.0, 2], np.array([1, 2])]
    params = SamplingParams(1, **numbers)
    one, other = decoder.request(prompts[0], params, **options), decoder.request(prompts[1], params, **same)
    assert repr(one.params) == repr(SamplingParams(1.0, top_k=5, seed=3, logit_bias={2: 1.0, 3: 0.5}))
    for name in ("prompt", "max_output_len", "stop_ids"):
        assert repr(getattr(one, name)) == repr(getattr(other, name))
    for name in ("min_output_len", "logprobs", "fixed_draft_len", "timeout"):
        assert repr(getattr(one.options, name)) == repr(getattr(other.options, name))
    assert decode(decoder, [one, other])[0] == one.output == other.output


@pytest.mark.parametrize(
    "options",
    [
        {"max_output_len": 2.5},
        {"max_output_len": "8"},
        {"max_output_len": True},
        {"min_output_len": None},
        {"stop": 1},
        {"stop": [1]},
        {"stop": b"x"},
        {"stop_ids": 3},
        {"stop_ids": ["3"]},
        {"stop_ids": [10**30]},
        {"draft_len": "fast"},
        {"draft_len": 1.5},
        {"acceptance": 3},
        {"logprobs": "all"},
        {"logprobs": [2]},
        {"timeout": "soon"},
        {"echo": 1},
        {"chat": "yes"},
        {"system": 5},
        {"params": 0.8},
        {"params": {"top_k": 2}},
    ],
    ids=str,
)
def test_other_types_are_refused_by_name(decoder: SpeculativeDecoder, options: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(options))):
        decoder.request([1, 2], **options)


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": "hot"},
        {"temperature": None},
        {"top_k": 2.5},
        {"top_k": True},
        {"top_p": "0.9"},
        {"seed": 1.5},
        {"seed": "7"},
        {"min_p": [0.1]},
        {"repetition_penalty": "x"},
        {"presence_penalty": 1j},
        {"frequency_penalty": True},
        {"logit_bias": {1.5: 1}},
        {"logit_bias": {"1": 1}},
        {"logit_bias": {1: "much"}},
        {"logit_bias": [(1, 2)]},
        {"logit_bias": None},
    ],
    ids=str,
)
def test_sampling_of_other_types_is_refused_by_name(params: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(params))):
        SamplingParams(**params)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Request([], SamplingParams(), 5),
        lambda: Request([V], SamplingParams(), 5),
        lambda: Request([-1], SamplingParams(), 5),
        lambda: Request([1.5], SamplingParams(), 5),  # type: ignore[list-item]
        lambda: Request([1], SamplingParams(), 0),
        lambda: Request([1], SamplingParams(), 10**6),
        lambda: Request([1], SamplingParams(), 5, options=RequestOptions(draft_len=9)),
        lambda: Request([1], SamplingParams(), 5, options=RequestOptions(logprobs=99)),
        lambda: Request([1], SamplingParams(), 5, frozenset(range(100))),
        lambda: Request([1], None, 5),  # type: ignore[arg-type]
    ],
)
def test_a_request_made_by_hand_is_refused_before_it_harms_others(decoder: SpeculativeDecoder, make: Any) -> None:
    (expected,) = decoder.generate([[3]], max_output_len=9)
    other = decoder.request([3], max_output_len=9)
    decoder.scheduler.add(other)
    decoder.scheduler.step()
    with pytest.raises(RequestError):
        decoder.scheduler.add(make())
    while len(decoder.scheduler):
        decoder.scheduler.step()
    assert other.output == expected.output


class Breaks(SamplingParams):
    """Settings whose use fails, in the middle of a round."""

    broken = ""

    @property
    def greedy(self) -> bool:
        if self.broken == "sample":
            raise ZeroDivisionError("in sampling")
        return False


class BrokenText(TextStream):
    """A tokenizer that fails."""

    def __init__(self) -> None:
        self.stop_text = None

    def push(self, token: int) -> str:
        raise ZeroDivisionError("in committing")


@pytest.mark.parametrize("draft_len", [0, 3])
@pytest.mark.parametrize("where", ["sample", "apply_penalties", "commit"])
def test_what_breaks_in_one_request_ends_that_one_alone(
    decoder: SpeculativeDecoder, where: str, draft_len: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    warm = SamplingParams(1.0, seed=5)
    (expected,) = decoder.generate([[3]], warm, max_output_len=20)
    params = Breaks(1.0, repetition_penalty=1.5 if where == "apply_penalties" else 1.0)
    broken = Request(
        [4], params, 20, stream=BrokenText() if where == "commit" else None, options=RequestOptions(draft_len=draft_len)
    )
    if where == "apply_penalties":
        monkeypatch.setattr(broken, "apply_penalties", lambda *_: 1 / 0)
    other = Request([3], warm, 20)
    for request in (broken, other):
        decoder.scheduler.add(request)
    decoder.scheduler.step()
    monkeypatch.setattr(Breaks, "broken", where)
    while len(decoder.scheduler):
        decoder.scheduler.step()
    assert broken.finish_reason == "error"
    assert "ZeroDivisionError" in str(broken.error)
    assert other.output == expected.output


def test_one_prompt_needs_no_list(engines: Path) -> None:
    with SpeculativeDecoder.open(engines / "target") as decoder:
        (text,) = decoder.generate("alpha beta", max_output_len=12)
        assert text.output == decoder.generate(["alpha beta"], max_output_len=12)[0].output
        ids = decoder.tokenizer.encode("alpha beta").ids
        prompts: list[Any] = [ids, np.array(ids), tuple(ids)]
        for prompt in prompts:
            (found,) = decoder.generate(prompt, max_output_len=12)
            assert found.output == text.output
        turns = [{"role": "user", "content": "alpha beta"}]
        (chat,) = decoder.generate(turns, max_output_len=12)
        assert chat.output == decoder.generate([turns], max_output_len=12)[0].output
        assert chat.text == decoder.generate("alpha beta", max_output_len=12, chat=True)[0].text


def test_one_stop_text_needs_no_list(engines: Path) -> None:
    with SpeculativeDecoder.open(engines / "target") as decoder:
        (free,) = decoder.generate("alpha", max_output_len=40)
        assert free.text
        stop = free.text[8:12]
        (stopped,) = decoder.generate("alpha", max_output_len=40, stop=stop)
        assert stopped.text
        assert stopped.text == free.text[: free.text.index(stop)]
        assert len(stopped.text) > 1
        assert stopped.finish_reason == "stop"


@pytest.mark.parametrize("prompts", [None, 5, [None], [5.5], {"role": "user"}, [["a", "b"]], [{"role": "user"}, 3]])
def test_prompts_of_other_types_are_refused(engines: Path, prompts: Any) -> None:
    with SpeculativeDecoder.open(engines / "target") as decoder, pytest.raises(RequestError):
        decoder.generate(prompts)


def test_paths_may_be_texts_and_other_types_are_refused(engines: Path) -> None:
    pair = (str(engines / "target"), str(engines / "draft"))
    config = DraftTargetConfig(draft_len="auto", draft_devices=[0.0])  # type: ignore[arg-type]
    with SpeculativeDecoder.open(*pair, config, tokenizer_dir=pair[0]) as decoder:
        assert decoder.generate("alpha", max_output_len=3)[0].output
    for arguments in ((None,), (5,), ("a\0b",), (pair[0], 5), (pair[0], pair[1], 4), (pair[0], pair[1], None, 5)):
        with pytest.raises(SpecError):
            SpeculativeDecoder.open(*arguments)
    for name, value in (
        ("draft_len", "four"),
        ("draft_len", -1),
        ("draft_devices", 0),
        ("use_logits", "no"),
        ("cuda_graph", None),
        ("warm_up", 1),
        ("max_tokens_in_kv_cache", 2.5),
        ("kv_cache_free_gpu_memory_fraction", "all"),
    ):
        with pytest.raises(RequestError, match=name):
            DraftTargetConfig(**{name: value})  # type: ignore[arg-type]


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
    wrong: list[Any] = [[-1, 3], [-(10**19), 1], [V], [1.5, 2], [None]]
    for bad in wrong:
        with pytest.raises(RequestError, match=r"token id|a prompt is"):
            decoder.request(bad)
    array: Any = np.array([3, 4])
    assert list(decoder.request(array).prompt) == [3, 4]
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
