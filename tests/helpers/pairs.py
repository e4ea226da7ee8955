"""Small pairs, opened and decoded."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.request.request import Request
from specrun.sampling.sampler import SamplingParams
from specrun.speculative.host_round import HostRound

PROMPTS = [[5, 9, 200], list(range(30, 70)), [17], [300, 4, 4, 4, 81, 9]]


LENGTH = 40


SAMPLED = SamplingParams(temperature=0.9, top_k=60, top_p=0.95, seed=11)


def decode(
    decoder: SpeculativeDecoder, prompts: Sequence[Sequence[int]], params: SamplingParams, length: int = LENGTH
) -> list[Request]:
    requests = [Request(prompt, params, length) for prompt in prompts]
    for _ in decoder.run(requests):
        pass
    return requests


def open_pair(
    target: Path, draft: Path | None, draft_len: int | None = None, use_logits: bool = False
) -> SpeculativeDecoder:
    return SpeculativeDecoder.open(target, draft, DraftTargetConfig(draft_len=draft_len, use_logits=use_logits))


def near_ties(target: Path, expected: list[int], found: list[int], prompt: Sequence[int]) -> int:
    """0 when the ids agree; 1 when they part where the target's two best tokens are a near-tie; fails otherwise.

    A wide verify pass and a one-token step add up in different orders, so logits differ in their last bits.
    """
    if expected == found:
        return 0
    at = next(i for i, (a, b) in enumerate(zip(expected, found, strict=True)) if a != b)
    round_ = open_pair(target, None).scheduler.round
    assert isinstance(round_, HostRound)
    runner = round_.target
    runner.reserve(1, 128)
    logits = runner.forward([[*prompt, *expected[:at]]], [1])[0, 0]
    second, best = np.sort(logits)[-2:]
    assert best - second < 1e-4, f"ids part at {at}: {expected[at]} and {found[at]}, logits {best} and {second}"
    return 1
