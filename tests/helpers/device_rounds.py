"""Rounds on the kernels' host build."""

from __future__ import annotations

import functools
from pathlib import Path

from specrun.devices import DeviceArray
from specrun.engine_dir.config import open_engine
from specrun.gpu.backend import Feed
from specrun.gpu.drafters.model import device_model_drafter
from specrun.gpu.ort import OrtDeviceBackend
from specrun.gpu.round import DeviceRound
from tests.helpers.host_device import HostDevice


class Recordable(OrtDeviceBackend):
    """As an engine that queues its work on the stream."""

    capturable = True
    device: HostDevice

    def enqueue(self, feed: Feed, logits: DeviceArray, first: int, fixed: bool) -> None:
        self.device.queue(functools.partial(super().enqueue, feed, logits, first, fixed))


def device_round(
    target: Path,
    draft: Path | None,
    draft_len: int,
    use_logits: bool = False,
    rows: int = 4,
    kind: type[OrtDeviceBackend] = OrtDeviceBackend,
    apart: bool = False,
    blocks: int = 0,
) -> DeviceRound:
    device = HostDevice()
    other = HostDevice() if apart else device
    drafter = functools.partial(device_model_drafter, kind(draft, open_engine(draft), other), True) if draft else None
    round_ = DeviceRound(
        kind(target, open_engine(target), device),
        drafter,
        draft_len,
        use_logits,
        rows,
    )
    round_.allocate_pools(blocks)
    return round_
