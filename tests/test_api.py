"""The Python API that the command is a thin layer over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.errors import RequestError
from specrun.sampling import SamplingParams

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


def test_token_ids_are_answered_by_token_ids(engines: Path) -> None:
    with SpeculativeDecoder.open(engines / "target", engines / "draft") as decoder:
        ids = decoder.tokenizer.encode("alpha beta").ids
        (by_text,) = decoder.generate(["alpha beta"], max_output_len=9)
        (by_ids,) = decoder.generate([ids], max_output_len=9)
        assert by_ids.output == by_text.output
        assert by_ids.text is None
        with pytest.raises(RequestError, match="no text to look for"):
            decoder.request(ids, stop=["x"])


def test_a_bad_request_is_refused_before_anything_runs(engines: Path) -> None:
    with SpeculativeDecoder.open(engines / "target") as decoder:
        cases: list[tuple[str | list[int], dict[str, Any], str]] = [
            ("", {}, "third: empty"),
            ([10**6], {}, "third: token id 1000000"),
            ([1], {"max_output_len": 10**6}, "give --max_output_len"),
        ]
        for prompt, options, words in cases:
            with pytest.raises(RequestError, match=words):
                decoder.request(prompt, name="third", **options)
