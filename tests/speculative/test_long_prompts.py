"""On a CPU, a draft reads a long prompt behind the text's first token."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.request.request import Request
from specrun.runners import cached_texts
from specrun.sampling.sampler import SamplingParams
from tests.helpers.pairs import SAMPLED
from tests.helpers.staggered import run_staggered

LONG = [*range(3, 48)]


@pytest.fixture(autouse=True)
def forty_tokens_are_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cached_texts, "LONG_PROMPT", 40)


def open_pair(engines: Path, draft: bool = True, draft_len: int | None = 3) -> SpeculativeDecoder:
    config = DraftTargetConfig(draft_len=draft_len, reuse_blocks=False)
    return SpeculativeDecoder.open(engines / "target", engines / "draft" if draft else None, config)


def draft_calls(decoder: SpeculativeDecoder, request: Request) -> list[int]:
    """Passes of the draft in each step that has written tokens of ``request``."""
    calls, written = [0], 0
    decoder.scheduler.add(request)
    while not request.finish_reason:
        decoder.scheduler.step()
        times = decoder.scheduler.round.engine_times()
        assert times
        if len(request.output) > written:
            written = len(request.output)
            calls.append(times.draft_calls)
    return [later - sooner for sooner, later in itertools.pairwise(calls)]


def test_the_first_token_waits_for_no_draft(engines: Path) -> None:
    """Then one pass reads the prompt, and rounds draft."""
    with open_pair(engines) as decoder:
        assert draft_calls(decoder, Request(LONG, SamplingParams(), 8))[:3] == [0, 1 + 3, 3]


def test_short_prompts_are_read_before(engines: Path) -> None:
    with open_pair(engines) as decoder:
        assert draft_calls(decoder, Request(LONG[:20], SamplingParams(), 8))[0] == 1 + 3


def test_a_text_of_one_token_is_never_read(engines: Path) -> None:
    with open_pair(engines) as decoder:
        assert draft_calls(decoder, Request(LONG, SamplingParams(), 1)) == [0]


@pytest.mark.parametrize("draft_len", [3, None])
@pytest.mark.parametrize("draft", ["draft", "suffix"])
def test_texts_are_those_of_the_target_alone(engines: Path, draft_len: int | None, draft: str) -> None:
    """Long prompts and short ones come while others decode."""
    prompts = [LONG, [5, 9], [*LONG, 7], [17, *LONG], [300, 4, 4, 4, 81, 9], [*range(60, 104)]]
    lengths = [30, 24, 18, 2, 40, 9]

    def texts(decoder: SpeculativeDecoder, seed: int) -> list[list[int]]:
        requests = [Request(p, SAMPLED, n) for p, n in zip(prompts, lengths, strict=True)]
        run_staggered(decoder, requests, seed)
        return [request.output for request in requests]

    with open_pair(engines, draft_len=draft_len) as decoder:
        found = [texts(decoder, seed) for seed in (1, 2, 3)]
    with open_pair(engines, draft=False) as decoder:
        expected = texts(decoder, 1)
    assert found == [expected] * 3
