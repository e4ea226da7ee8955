"""Caches that cannot grow for a newcomer, while another request is under way."""

from __future__ import annotations

from typing import Any

import pytest

from specrun.decoder import SpeculativeDecoder
from specrun.request.options import RequestOptions
from specrun.request.request import Request
from specrun.sampling.sampler import SamplingParams

LONG = [(7 * n) % 50 + 5 for n in range(70)]


def caches(decoder: SpeculativeDecoder) -> list[Any]:
    """The target's cache, and the draft's."""
    round_ = decoder.scheduler.round
    return [texts.runner.rows.cache for texts in round_._caches]


def check_newcomer_fails_alone(decoder: SpeculativeDecoder, which: int, scored: bool, steps: int) -> None:
    """which: of ``caches`` cannot grow. steps: that the other request has had before."""

    def under_way() -> Request:
        return Request(
            LONG, SamplingParams(0.7, seed=3), 24, options=RequestOptions(prompt_logprobs=2 if scored else None)
        )

    decoder.scheduler.always_chunk = True
    expected = under_way()
    for _ in decoder.run([expected]):
        pass
    request, newcomer = under_way(), Request([9] * 20, SamplingParams(), 90)
    decoder.scheduler.add(request)
    for _ in range(steps):
        decoder.scheduler.step()
    cache = caches(decoder)[which]
    allocate = cache._allocate

    def fail(*_arguments: Any) -> Any:
        raise MemoryError

    cache._allocate = fail
    decoder.scheduler.add(newcomer)
    with pytest.raises(MemoryError):
        while not newcomer.finish_reason:
            decoder.scheduler.step()
    assert newcomer.finish_reason == "error"
    decoder.scheduler.step()
    assert request.finish_reason is None and not request.error
    cache._allocate = allocate
    again = Request([9] * 20, SamplingParams(), 90)
    for _ in decoder.run([again]):
        pass
    while not request.finish_reason:
        decoder.scheduler.step()
    assert request.error is None and again.error is None
    assert request.output == expected.output
    assert request.prompt_token_logprobs == expected.prompt_token_logprobs
    assert len(request.prompt_token_logprobs) == (len(LONG) - 1 if scored else 0)
