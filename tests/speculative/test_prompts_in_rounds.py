"""On a CPU, a round reads what is left of a prompt, so short prompts need no pass of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specrun import cpu_operators
from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.request.options import RequestOptions
from specrun.request.request import Request
from specrun.sampling.sampler import SamplingParams
from specrun.speculative.host_round import HostRound
from tests.helpers.pairs import SAMPLED
from tests.helpers.round_times import told_times
from tests.helpers.staggered import run_staggered

pytestmark = pytest.mark.skipif(not cpu_operators.is_available(), reason="unused tokens cost time")

LONG = [*range(100, 140)]
"""Two blocks of the prefix cache, and more."""
PROMPTS = [[5, 9], LONG, [*LONG, *range(200, 240)], [17], [*LONG, 7], [300, 4, 4, 4, 81, 9], [*range(60, 75)]]
LENGTHS = [30, 10, 24, 1, 18, 40, 9]


def open_pair(engines: Path, draft: bool = True, **config: Any) -> SpeculativeDecoder:
    return SpeculativeDecoder.open(
        engines / "target", engines / "draft" if draft else None, DraftTargetConfig(**config)
    )


def target_calls(decoder: SpeculativeDecoder, prompt: list[int], **options: Any) -> int:
    """Passes of the target, of a text of one token."""
    before = decoder.scheduler.round.engine_times()
    (request,) = requests = [Request(prompt, SamplingParams(), 1, options=RequestOptions(**options))]
    for _ in decoder.run(requests):
        pass
    assert len(request.output) == 1
    after = decoder.scheduler.round.engine_times()
    assert before and after
    return after.target_calls - before.target_calls


def test_a_prompt_and_the_first_token_take_one_pass(engines: Path) -> None:
    """A pass has 48 tokens of a row at most. Scored prompts are read by themselves."""
    with open_pair(engines, draft_len=3, reuse_blocks=False) as decoder:
        assert [target_calls(decoder, [*range(3, 3 + count)]) for count in (1, 2, 20, 48)] == [1, 1, 1, 1]
        assert target_calls(decoder, [*range(3, 52)]) == 2
        assert target_calls(decoder, [*range(3, 23)], prompt_logprobs=0) == 2


@pytest.mark.parametrize("draft_len", [0, 3, None])
def test_texts_are_those_of_prompts_that_are_read_before(
    engines: Path, draft_len: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts come while others decode, and begin like those of before. Their log-probabilities are the same, too."""

    def texts(decoder: SpeculativeDecoder, seed: int) -> list[list[Any]]:
        requests = [
            Request(p, SAMPLED, n, options=RequestOptions(logprobs=1)) for p, n in zip(PROMPTS, LENGTHS, strict=True)
        ]
        run_staggered(decoder, requests, seed)
        return [[(token.token, token.logprob) for token in request.token_outputs] for request in requests]

    with open_pair(engines, draft_len=draft_len) as decoder:
        found = [texts(decoder, seed) for seed in (1, 2, 3)]
    monkeypatch.setattr(HostRound, "reads_prompts", lambda *_: False)
    with open_pair(engines, draft=False) as decoder:
        expected = texts(decoder, 1)
    assert found == [expected] * 3


def test_what_a_round_has_read_is_found_by_other_prompts(engines: Path) -> None:
    """Of a prompt that waited until this one was read, and of a later one."""
    with open_pair(engines, draft_len=3) as decoder:
        requests = [Request([*LONG, token], SamplingParams(), 4) for token in (3, 4)]
        for _ in decoder.run(requests):
            pass
        later = Request([*LONG, 5], SamplingParams(), 4)
        for _ in decoder.run([later]):
            pass
    assert [request.stats.cached for request in (*requests, later)] == [0, 32, 32]


def test_such_a_round_says_nothing_of_others(engines: Path) -> None:
    """Its time would count as that of a round with so many draft tokens."""
    with open_pair(engines, draft_len=None) as decoder:
        decoder.scheduler.add(Request([*range(3, 40)], SamplingParams(), 20, options=RequestOptions(draft_len=2)))
        with told_times(decoder.scheduler) as times:
            while len(times) < 3:
                decoder.scheduler.step()
    assert [seconds is None for seconds in times] == [True, False, False]
