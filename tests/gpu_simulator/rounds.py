"""Requests in batches, and the widths of the devices that serve them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.request.options import RequestOptions
from specrun.request.request import Request
from tests.helpers.staggered import MANNERS, V, run_staggered
from tests.helpers.tables import decode

PLACES = {"one GPU": ((0,), (0,)), "the second": ((1,), (1,)), "apart": ((1,), (0,)), "the other way": ((0,), (1,))}


BATCHES = (1, 3, 4)


LENGTH = 10


def requests(count: int) -> list[Request]:
    """Of every manner; the last is accepted by logits, where it samples."""
    some = []
    for number in range(count):
        params = replace(MANNERS[number % len(MANNERS)], seed=number)
        prompt = [*range(3, 20 + number % 3), number % V]
        some.append(
            Request(
                prompt,
                params,
                LENGTH,
                options=RequestOptions(
                    acceptance="logits" if number % 7 == 6 else "tokens", logprobs=2 if number == 1 else None
                ),
            )
        )
    return some


def in_batches(decoder: SpeculativeDecoder) -> list[list[int]]:
    """Whole batches of each size, then requests that come and go."""
    found = []
    for size in BATCHES:
        found += decode(decoder, requests(size))
    coming = requests(14)
    run_staggered(decoder, coming, 1)
    return found + [request.output for request in coming]


def config(place: str, **settings: Any) -> DraftTargetConfig:
    draft, target = PLACES[place]
    return DraftTargetConfig(3, draft, target, **settings)
