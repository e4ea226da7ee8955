"""Pairs whose models fail at a chosen place."""

from __future__ import annotations

import functools
from pathlib import Path

from specrun.backends import open_host_backend
from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from specrun.drafters.model import ModelDrafter
from specrun.engine_dir.config import open_engine
from specrun.gpu.drafters.model import device_model_drafter
from specrun.gpu.ort import OrtDeviceBackend
from specrun.gpu.round import DeviceRound
from specrun.runners.host_runner import ModelRunner
from specrun.speculative.draft_length import DraftLength
from tests.helpers.host_device import HostDevice
from tests.helpers.repetitive_requests import on_device

V, G = 12, 4


PLACES = ["host", "uploaded", "device", "another device"]


def open_pair(place: str, target: Path, draft: Path | None, use_logits: bool = False) -> SpeculativeDecoder:
    """A draft engine at ``place`` beside a target: on the host for ``host``, else on a device."""
    config = open_engine(target)
    if place == "host" or draft is None:
        settings = DraftTargetConfig(G if draft else None, use_logits=use_logits)
        return SpeculativeDecoder.open(target, draft, settings)
    if place == "uploaded":
        runner = ModelRunner(open_host_backend(draft, open_engine(draft), 20))
        return on_device(target, ModelDrafter(runner, config.graph.vocab_size, G, use_logits), G, use_logits=use_logits)
    here = HostDevice()
    there = here if place == "device" else HostDevice()
    drafter = functools.partial(device_model_drafter, OrtDeviceBackend(draft, open_engine(draft), there), True)
    rounds = DeviceRound(OrtDeviceBackend(target, config, here), drafter, G, use_logits, 4)
    rounds.allocate_pools(20)
    return SpeculativeDecoder(rounds, DraftLength(G, G), config, 4)
