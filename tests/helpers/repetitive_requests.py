"""Requests whose texts repeat themselves."""

from __future__ import annotations

import functools
from pathlib import Path

from specrun.decoder import SpeculativeDecoder
from specrun.drafters import Drafter
from specrun.engine_dir.config import open_engine
from specrun.gpu.drafters.uploaded import UploadedDrafter
from specrun.gpu.ort import OrtDeviceBackend
from specrun.gpu.round import DeviceRound
from specrun.request.request import Request
from specrun.sampling.sampler import SamplingParams
from specrun.speculative.draft_length import DraftLength
from tests.helpers.host_device import HostDevice

V = 12


PARAMS = (
    SamplingParams(),
    SamplingParams(0.9, seed=5),
    SamplingParams(0.8, top_k=6, top_p=0.9, repetition_penalty=1.1, seed=6),
    SamplingParams(1.1, min_p=0.05, frequency_penalty=0.2, logit_bias={3: 1.5}, seed=7),
)


def on_device(
    target: Path, drafter: Drafter, draft_len: int, auto: bool = False, use_logits: bool = False, rows: int = 4
) -> SpeculativeDecoder:
    """``drafter``'s drafts are uploaded to the target's device."""
    config = open_engine(target)
    backend = OrtDeviceBackend(target, config, HostDevice())
    rounds = DeviceRound(backend, functools.partial(UploadedDrafter, drafter), draft_len, use_logits, rows)
    rounds.allocate_pools(20)
    return SpeculativeDecoder(rounds, DraftLength(draft_len, None if auto else draft_len), config, rows, target)


def some_requests(length: int = 40) -> list[Request]:
    prompts = [[3, 1, 3, 1], list(range(9)), [5], [2, 2, 2, 7, 2], [8] * 20, [4, 6]]
    return [Request(prompt, PARAMS[n % 4], length + n) for n, prompt in enumerate(prompts)]
