"""The Python API that the command is a thin layer over."""

from __future__ import annotations

from pathlib import Path

import pytest

from specrun import DraftTargetConfig, RequestError, SamplingParams, SpeculativeDecoder

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
        stop = by_text.text[3:6]
        (stopped,) = decoder.generate([ids], max_output_len=9, stop=stop, echo=True)
        assert stopped.text == "alpha beta" + by_text.text[: by_text.text.index(stop)]
        assert stopped.finish_reason == "stop"


def test_a_bad_request_is_refused_before_anything_runs(engines: Path) -> None:
    with SpeculativeDecoder.open(engines / "target") as decoder:
        for prompt, options, words in [
            ("", {}, "third: empty"),
            ([10**6], {}, "third: token id 1000000"),
            ([1], {"max_output_len": 10**6}, "give --max_output_len"),
        ]:
            with pytest.raises(RequestError, match=words):
                decoder.request(prompt, name="third", **options)
