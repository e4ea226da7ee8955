"""Plans of several ranks on as many GPUs: one model that is computed together (tensor parallel).

The first rank's GPU holds inputs and logits, and rounds run there. The others get copies of the inputs, and have caches
of their own heads. Collectives in the plans let a rank wait for the others. TensorRT blocks the calling thread where it
sets a communicator, until all ranks have called; so every rank has a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from typing_extensions import override

from specrun.devices import Device, DeviceArray
from specrun.devices.nccl import Communicators
from specrun.engine_dir.config import EngineConfig
from specrun.errors import EngineLostError
from specrun.gpu.backend import DeviceBackend, DeviceCache, Feed
from specrun.gpu.cache import DeviceKVCache
from specrun.gpu.trt import TrtBackend


class RanksKVCache(DeviceCache):
    """See ``DeviceCache``: what is done to a row is done on every rank. Recurrent layers are refused before."""

    states = None
    kept_states = 0

    def __init__(self, caches: Sequence[DeviceKVCache]) -> None:
        self._caches = caches
        self.rows, self.length, self.blocks = caches[0].rows, caches[0].length, 0

    @override
    def allocate_pool(self, blocks: int) -> None:
        for cache in self._caches:
            cache.allocate_pool(blocks)
        self.blocks = blocks

    @override
    def part(self, first: int, rows: int) -> list[DeviceArray]:
        """The first rank's, whose features are those of the whole model."""
        return self._caches[0].part(first, rows)

    @override
    def clear(self, row: int) -> None:
        for cache in self._caches:
            cache.clear(row)

    @override
    def swap(self, one: int, other: int, lengths: tuple[int, int]) -> None:
        for cache in self._caches:
            cache.swap(one, other, lengths)

    @override
    def save(self, row: int, start: int, blocks: Sequence[int]) -> None:
        for cache in self._caches:
            cache.save(row, start, blocks)

    @override
    def load(self, row: int, start: int, blocks: Sequence[int]) -> None:
        for cache in self._caches:
            cache.load(row, start, blocks)

    @override
    def clear_states(self, row: int) -> None:
        """Nothing: models with recurrent layers have no ranks on GPUs."""

    @override
    def save_state(self, row: int, place: int) -> None:
        """Nothing: models with recurrent layers have no ranks on GPUs."""

    @override
    def load_state(self, row: int, place: int) -> None:
        """Nothing: models with recurrent layers have no ranks on GPUs."""


class TrtRanks(DeviceBackend):
    """See ``DeviceBackend``."""

    def __init__(
        self, directory: Path, config: EngineConfig, devices: Sequence[Device], capabilities: Sequence[str]
    ) -> None:
        """Load the plan of rank r onto ``devices[r]``. Raises EngineDirError and BackendError."""
        self.config = config
        self.device, self.devices = devices[0], devices
        self._threads = ThreadPoolExecutor(len(devices), "rank")
        self._lost = ""
        """Why no rank goes on."""
        self._communicators: Communicators | None = None
        self._ranks: list[TrtBackend] = []
        try:
            for rank, (device, capability) in enumerate(zip(devices, capabilities, strict=True)):
                self._ranks.append(TrtBackend(directory, config.of_rank(rank), device, capability))
            self._communicators = Communicators([device.number for device in devices])
        except BaseException:
            self.close()
            raise
        for backend, communicator in zip(self._ranks, self._communicators.capsules, strict=True):
            backend.communicator = communicator
        self._feeds: list[Feed] = []
        self._logits: list[DeviceArray] = []

    @property
    @override
    def capturable(self) -> bool:
        """A recording is one GPU's."""
        return False

    @property
    @override
    def workspace_bytes(self) -> int:
        """Of the rank that needs most."""
        return max(rank.workspace_bytes for rank in self._ranks)

    @override
    def allocate_cache(self) -> None:
        """The other ranks also get memory for inputs and logits."""
        for rank in self._ranks:
            rank.allocate_cache()
        self.cache = RanksKVCache([rank.cache for rank in self._ranks])
        profiles, vocab = self.config.build_config.profiles, self.config.graph.vocab_size
        rows = self.config.build_config.max_batch_size
        tokens, kept = (max(getattr(profile, name)[2] for profile in profiles) for name in ("sequence", "logits"))
        for rank in self._ranks[1:]:
            zeros = rank.device.zeros
            sizes = ((rows, tokens), (rows,), (rows, kept))
            self._feeds.append(Feed(*(zeros(size, np.int64) for size in sizes)))
            self._logits.append(zeros((rows, kept, vocab), np.float32))

    @override
    def enqueue(self, feed: Feed, logits: DeviceArray, first: int, fixed: bool) -> None:
        """Nothing further runs on the first rank's GPU before all ranks are done."""
        work: list[Callable[[], None]] = [lambda: self._ranks[0].enqueue(feed, logits, first, fixed)]
        for rank, memory, own_logits in zip(self._ranks[1:], self._feeds, self._logits, strict=True):
            rank.device.wait_for(self.device)
            own = Feed(*(array.part(0, given.shape) for array, given in zip(memory, feed, strict=True)))
            for to, source in zip(own, feed, strict=True):
                rank.device.copy(to, source)
            work.append(_enqueue(rank, own, own_logits.part(0, logits.shape), first, fixed))
        self._run(work)
        for rank in self._ranks[1:]:
            self.device.wait_for(rank.device)

    def _run(self, work: Sequence[Callable[[], None]]) -> None:
        """Every rank's work in a thread of its own. Raises EngineLostError where ranks wait for one that failed."""
        if self._lost:
            raise EngineLostError(self._lost)
        threads = [self._threads.submit(one) for one in work]
        errors = {rank: error for rank, thread in enumerate(threads) if (error := thread.exception())}
        if not errors:
            return
        rank, error = next(iter(errors.items()))
        if len(errors) == len(work) or self._communicators is None:  # Nobody waits.
            raise error
        self._communicators.abort()
        self._lost = f"rank {rank} of {len(work)} failed, and no rank goes on: {error}"
        raise EngineLostError(self._lost) from error

    @override
    def save_kernels(self) -> None:
        for rank in self._ranks:
            rank.save_kernels()

    @override
    def close(self) -> None:
        self._threads.shutdown()
        for rank in self._ranks:
            rank.close()
        if self._communicators:
            self._communicators.close()
            self._communicators = None


def _enqueue(rank: TrtBackend, feed: Feed, logits: DeviceArray, first: int, fixed: bool) -> Callable[[], None]:
    return lambda: rank.enqueue(feed, logits, first, fixed)
