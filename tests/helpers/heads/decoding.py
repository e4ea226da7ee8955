"""Pairs with a head, opened and decoded in every manner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from specrun.backends import open_host_backend
from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.drafters.markov import Markov
from specrun.engine_dir.config import open_engine
from specrun.gpu.drafters.heads import DeviceHeadDrafter, DeviceParallelDrafter
from specrun.gpu.ort import OrtDeviceBackend
from specrun.gpu.round import DeviceRound
from specrun.request.options import RequestOptions
from specrun.request.request import Request
from specrun.runners.host_runner import ModelRunner
from specrun.sampling.sampler import SamplingParams, probabilities
from tests.helpers.device_rounds import Recordable
from tests.helpers.heads.trained import PROMPTS
from tests.helpers.host_device import HostDevice

LENGTH = 30


GREEDY = SamplingParams()


MANNERS = {
    "greedy": GREEDY,
    "sampled": SamplingParams(temperature=0.9, top_k=60, top_p=0.95, seed=11),
    "penalties": SamplingParams(temperature=0.7, repetition_penalty=1.2, seed=3),
}


LONG = [*range(100, 148)]
"""Three blocks of the prefix cache."""


def open_pair(pair: Path, head: bool, **config: Any) -> SpeculativeDecoder:
    return SpeculativeDecoder.open(pair / "target", pair / "head" if head else None, DraftTargetConfig(**config))


def decode(
    decoder: SpeculativeDecoder, prompts: Sequence[Sequence[int]], params: SamplingParams, **options: Any
) -> list[Request]:
    requests = [Request(prompt, params, LENGTH, options=RequestOptions(**options)) for prompt in prompts]
    for _ in decoder.run(requests):
        pass
    return requests


def coming(count: int, drafts: bool) -> list[Request]:
    manners = list(MANNERS.values())
    prompts = [*PROMPTS, [*LONG, 7], [*LONG, 8, 9]]
    return [
        Request(
            prompts[n % 6],
            replace(manners[n % 3], seed=n),
            5 + n,
            options=RequestOptions(draft_len=[None, 0, 2][n % 3] if drafts else None),
        )
        for n in range(count)
    ]


def decode_all(decoder: SpeculativeDecoder, requests: Sequence[Request]) -> list[list[int]]:
    for _ in decoder.run(requests):
        pass
    return [request.output for request in requests]


def device_round(
    pair: Path, draft_len: int, use_logits: bool, kind: type[OrtDeviceBackend] = Recordable
) -> DeviceRound:
    """Heads that draft all in one pass get memory for their longest drafts, of which shorter rounds use a part."""
    device, config = HostDevice(), open_engine(pair / "head")
    target = kind(pair / "target", open_engine(pair / "target"), device)
    head = kind(pair / "head", config, device, target)
    if config.graph.parallel_drafts:
        markov = Markov.open(pair / "head", config.graph)
        round_ = DeviceRound(target, lambda rows: DeviceParallelDrafter(head, rows, markov), 4, use_logits, 4)
    else:
        round_ = DeviceRound(target, lambda rows: DeviceHeadDrafter(head, rows), draft_len, use_logits, 4)
    round_.allocate_pools(12)
    return round_


WARM = SamplingParams(1.2, top_k=3, seed=1)


TEXT = [5, 9, 200]


DRAWS = 600


def drawn(pair: Path, **settings: Any) -> Counter[tuple[int, ...]]:
    requests = [Request(TEXT, replace(WARM, seed=seed), 3) for seed in range(DRAWS)]
    with open_pair(pair, head=True, draft_len=2, use_logits=True, **settings) as decoder:
        return Counter(tuple(ids) for ids in decode_all(decoder, requests))


def exact(pair: Path) -> dict[tuple[int, ...], float]:
    """The probability of every three tokens that may follow ``TEXT``."""
    target = ModelRunner(open_host_backend(pair / "target", open_engine(pair / "target"), 0))
    target.reserve(1, 64)
    known: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer: dict[tuple[int, ...], float] = {}
        for ids, so_far in known.items():
            target.rows.rewind(0, len(TEXT) - 1)
            p = probabilities(target.forward([[*TEXT, *ids]], [1])[0, 0], WARM)
            longer |= {(*ids, int(token)): so_far * float(p[token]) for token in np.flatnonzero(p)}
        known = longer
    return known


def misfit(seen: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """The chi-squared statistic; infinite where something impossible was seen."""
    assert seen.total() == DRAWS
    if seen.keys() - expected.keys():
        return float("inf")
    return sum((seen[ids] - DRAWS * p) ** 2 / (DRAWS * p) for ids, p in expected.items())
