"""Passes of an engine on a GPU, one by one."""

from __future__ import annotations

from typing import Any

import numpy as np

from specrun.gpu.backend import DeviceBackend, Feed
from specrun.sampling.sampler import Floats


class Passes:
    """An opened engine, whose passes are run one by one."""

    def __init__(self, backend: DeviceBackend) -> None:
        self.backend = backend
        backend.allocate_cache()
        for row in range(backend.cache.rows):  # What a mask hides does not count.
            for tensor in backend.cache.part(row, 1):
                backend.device.write(tensor, np.full(tensor.shape, 0x4444, np.uint16))

    def run(self, ids: Any, starts: Any, wanted: Any, first: int = 0) -> Floats:
        """Logits [B, K, V] of tokens [B, S] of the rows from ``first`` on."""
        device = self.backend.device
        given = [np.asarray(each, np.int64) for each in (ids, starts, wanted)]
        feed = Feed(*(device.zeros(each.shape, np.int64) for each in given))
        for array, values in zip(feed, given, strict=True):
            device.write(array, values)
        logits = device.zeros((*given[2].shape, self.backend.config.graph.vocab_size), np.float32)
        self.backend.enqueue(feed, logits, first, fixed=False)
        found = device.pinned_like(logits)
        device.copy_to_host(logits, found)
        device.wait()
        return found.copy()
