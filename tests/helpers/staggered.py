"""Requests that come and go while others run."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from specrun.decoder import SpeculativeDecoder
from specrun.request.options import RequestOptions
from specrun.request.request import Request
from specrun.sampling.sampler import SamplingParams
from specrun.speculative.host_round import HostRound

V = 24


MANNERS = [
    SamplingParams(),
    SamplingParams(1.0),
    SamplingParams(0.8, top_k=9, top_p=0.9, min_p=0.01),
    SamplingParams(repetition_penalty=1.4),
    SamplingParams(1.2, presence_penalty=0.7, frequency_penalty=0.3, logit_bias={3: 1.5, 4: -math.inf}),
]


def some_requests(count: int, seed: int = 0, longest: int = 90) -> list[Request]:
    """Of every manner; many begin alike."""
    generator = random.Random(seed)
    beginnings = [generator.choices(range(V), k=70) for _ in range(3)]
    requests = []
    for number in range(count):
        beginning = generator.choice(beginnings)[: generator.randrange(71)]
        own = generator.choices(range(V), k=generator.randint(1, max(1, longest - 70)))
        params = replace(generator.choice(MANNERS), seed=number)
        draft_len, by_logits = generator.choice([None, None, 0, 2]), generator.choice([None, True])
        length = generator.randint(1, 30)
        requests.append(
            Request(
                [*beginning, *own],
                params,
                length,
                options=RequestOptions(draft_len=draft_len, acceptance="logits" if by_logits else None),
            )
        )
    return requests


def run_staggered(decoder: SpeculativeDecoder, requests: Sequence[Request], seed: int) -> None:
    """Requests arrive while others run."""
    generator, waiting = random.Random(seed), list(requests)
    while waiting or len(decoder.scheduler):
        for _ in range(min(len(waiting), generator.choice([0, 0, 1, 3]))):
            decoder.scheduler.add(waiting.pop())
        decoder.scheduler.step()


class Widths:
    """Notes the shapes a runner feeds its engine."""

    def __init__(self, decoder: SpeculativeDecoder) -> None:
        assert isinstance(decoder.scheduler.round, HostRound)
        backend: Any = decoder.scheduler.round.target.backend
        self.shapes: list[tuple[int, int]] = []
        self.bind, backend.bind = backend.bind, self

    def __call__(self, first: int, rows: int, width: int, kept: int) -> Any:
        self.shapes.append((rows, width))
        return self.bind(first, rows, width, kept)
