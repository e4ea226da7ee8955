"""The Python API that the command is a thin layer over."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from specrun import (
    Conversation,
    DraftTargetConfig,
    Request,
    RequestError,
    RequestOptions,
    SamplingParams,
    SpeculativeDecoder,
)
from specrun.cli import main
from specrun.output import as_json
from tests.helpers.engines import redescribe

SAMPLED = SamplingParams(temperature=0.8, seed=3)


def test_generate_and_stream_agree(engines: Path) -> None:
    with SpeculativeDecoder.open(engines / "target", engines / "draft", DraftTargetConfig(4)) as decoder:
        first, second = decoder.generate(["alpha beta", "gamma"], SAMPLED, max_output_len=20)
        assert len(first.output) <= 20
        assert first.finish_reason in ("stop", "length")
        pieces = list(decoder.stream("gamma", SAMPLED, max_output_len=20))
    assert [piece.token for piece in pieces] == second.output
    assert "".join(piece.text for piece in pieces) == second.text
    assert any(piece.from_draft for piece in pieces) == (second.stats.accepted > 0)


def test_token_ids_are_answered_by_token_ids_and_text(engines: Path) -> None:
    with SpeculativeDecoder.open(engines / "target", engines / "draft") as decoder:
        ids = decoder.tokenizer.encode("alpha beta").ids
        (by_text,) = decoder.generate(["alpha beta"], max_output_len=9)
        (by_ids,) = decoder.generate([ids], max_output_len=9)
        assert by_ids.output == by_text.output
        assert by_ids.text == by_text.text
        assert by_text.text
        stop = by_text.text[3:6]
        (stopped,) = decoder.generate([ids], max_output_len=9, stop=stop, echo=True)
        assert stopped.text == "alpha beta" + by_text.text[: by_text.text.index(stop)]
        assert stopped.finish_reason == "stop"


def test_a_bad_request_is_refused_before_anything_runs(engines: Path) -> None:
    with SpeculativeDecoder.open(engines / "target") as decoder:
        cases: list[tuple[str | list[int], dict[str, Any], str]] = [
            ("", {}, "third: empty"),
            ([10**6], {}, "third: token id 1000000"),
            ([1], {"max_output_len": 10**6}, "or fewer, or build with"),
        ]
        for prompt, options, words in cases:
            with pytest.raises(RequestError, match=words):
                decoder.request(prompt, name="third", **options)


def test_the_answers_of_one_prompt_count_seeds_up(engines: Path) -> None:
    with SpeculativeDecoder.open(engines / "target", engines / "draft") as decoder:
        found = decoder.generate(["alpha beta", "gamma"], SAMPLED, n=3, max_output_len=12)
        assert [request.params.seed for request in found] == [3, 4, 5] * 2
        for number, request in enumerate(found):
            params = replace(SAMPLED, seed=3 + number % 3)
            (alone,) = decoder.generate(["alpha beta", "gamma"][number // 3], params, max_output_len=12)
            assert request.text == alone.text
        assert len({request.text for request in found[:3]}) > 1
        last = SamplingParams(temperature=1.0, seed=2**64 - 1)
        assert [each.params.seed for each in decoder.requests("a", last, n=2)] == [2**64 - 1, 0]
        assert [each.error is None for each in decoder.requests(["alpha", ""], n=2)] == [True, True, False, False]
        bad: Any
        for bad, words in ((0, "n 0: expected 1 or more"), (1.5, "n 1.5: expected a whole number")):
            with pytest.raises(RequestError, match=words):
                decoder.generate("alpha", n=bad)


def test_a_seed_that_is_not_given_is_drawn_and_told(engines: Path) -> None:
    unseeded = SamplingParams(temperature=1.0)
    with SpeculativeDecoder.open(engines / "target") as decoder:
        first, second = decoder.generate(["alpha", "alpha"], unseeded, max_output_len=20)
        assert first.params.seed != second.params.seed
        assert first.output != second.output
        again = SamplingParams(temperature=1.0, seed=first.params.seed)
        assert decoder.generate("alpha", again, max_output_len=20)[0].output == first.output
        three = [request.params.seed for request in decoder.requests("alpha", unseeded, n=3)]
        assert three[0] is not None
        assert three == [three[0], three[0] + 1, three[0] + 2]
        assert decoder.request("alpha").params.seed == 0
        assert decoder.request("alpha", SamplingParams(seed=5)).params.seed == 5
    assert unseeded.seed is None
    by_hand = [Request([1], unseeded, 5).params.seed for _ in range(2)]
    assert None not in by_hand and by_hand[0] != by_hand[1]
    assert json.loads(as_json(first))["seed"] == first.params.seed


def test_options_are_given_as_one_or_as_keywords(engines: Path) -> None:
    options = RequestOptions(max_output_len=12, echo=True)
    with SpeculativeDecoder.open(engines / "target") as decoder:
        (given,) = decoder.generate("alpha", None, options)
        assert given.text
        assert given.text == decoder.generate("alpha", max_output_len=12, echo=True)[0].text
        assert len(decoder.generate("alpha", None, options, max_output_len=3)[0].output) == 3
        assert "".join(piece.text for piece in decoder.stream("alpha", None, options)) == given.text[len("alpha") :]
        call: Any
        for call in (decoder.generate, decoder.requests, decoder.request, partial(Conversation, decoder)):
            arguments = () if isinstance(call, partial) else ("alpha",)
            with pytest.raises(RequestError, match="max_outptu_len: no such option; did you mean max_output_len"):
                call(*arguments, max_outptu_len=3)
            with pytest.raises(RequestError, match=r"options \{'echo': True\}: expected RequestOptions"):
                call(*arguments, None, {"echo": True})
        with pytest.raises(RequestError, match="decoder 5: expected SpeculativeDecoder"):
            Conversation(5)  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="text 5: expected a text"):
            next(Conversation(decoder).say(5))  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="prompt: message 2: content 5: expected a text"):
            decoder.request([{"role": "user", "content": "a"}, {"role": "user", "content": 5}])  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="on_warm_up 5"):
            SpeculativeDecoder.open(engines / "target", on_warm_up=5)  # type: ignore[arg-type]


def test_echo_of_token_ids_shows_their_text(engines: Path) -> None:
    with SpeculativeDecoder.open(engines / "target", engines / "draft") as decoder:
        ids = decoder.tokenizer.encode("alpha beta").ids
        for prompt in ("alpha beta", ids):
            (request,) = decoder.generate([prompt], max_output_len=9, echo=True)
            assert request.text == "alpha beta" + decoder.tokenizer.decode(request.output)
        with pytest.raises(RequestError, match="chat: only for texts and messages"):
            decoder.request(ids, chat=True)


def test_token_ids_without_a_tokenizer_are_answered_by_token_ids(engines: Path, tmp_path: Path) -> None:
    engine = shutil.copytree(engines / "target", tmp_path / "engine")
    (engine / "tokenizer.json").unlink()
    redescribe(engine)
    with SpeculativeDecoder.open(engine) as decoder, SpeculativeDecoder.open(engines / "target") as other:
        ids = other.tokenizer.encode("alpha beta").ids
        (bare,) = decoder.generate([ids], max_output_len=9)
        assert bare.text is None
        assert bare.output == other.generate([ids], max_output_len=9)[0].output
        for options in ({"stop": "x"}, {"echo": True}):
            with pytest.raises(RequestError, match=f"{next(iter(options))}: without a tokenizer token ids"):
                decoder.request(ids, **options)
        with pytest.raises(RequestError, match=r"no tokenizer\.json"):
            decoder.request("alpha")


def test_the_command_writes_n_answers_and_tells_their_seeds(engines: Path) -> None:
    flags = ["generate", "--engine_dir", str(engines / "target"), "--input_text", "alpha", "--input_text", "beta"]
    flags += ["--n", "2", "--max_output_len", "8"]
    said = CliRunner().invoke(main, [*flags, "--temperature", "1", "--output_format", "json"])
    assert said.exit_code == 0, said.stderr
    (seed,) = map(int, re.findall(r"^seed (\d+)$", said.stderr, re.MULTILINE))
    answers = [json.loads(line) for line in said.stdout.splitlines()]
    assert [answer["seed"] for answer in answers] == [seed, seed + 1] * 2
    with SpeculativeDecoder.open(engines / "target") as decoder:
        found = decoder.generate(["alpha", "beta"], SamplingParams(1.0, seed=seed), n=2, max_output_len=8)
    assert [answer["text"] for answer in answers] == [request.text for request in found]
    text = CliRunner().invoke(main, flags)
    assert re.findall(r"^=== (.*)$", text.stdout, re.MULTILINE) == [
        "1/4: alpha",
        "2/4: alpha",
        "3/4: beta",
        "4/4: beta",
    ]
    assert "note: temperature 0 is greedy: the 2 answers of a prompt are the same" in text.stderr
