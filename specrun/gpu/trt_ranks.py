"""Plans of several ranks on as many GPUs: one model that is computed together (tensor parallel).

The first rank's GPU holds inputs and logits, and rounds run there. The others get copies of the inputs, and have caches
of their own heads. Collectives in the plans let a rank wait for the others. TensorRT blocks the calling thread where it
sets a communicator, until all ranks have called; so every rank has a thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
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
    """The caches of all ranks; calls for a row go to each. Models with recurrent layers have no ranks on GPUs."""

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
        """Views of the first rank's rows, whose features are those of the whole model."""
        return self._caches[0].part(first, rows)

    @override
    def clear(self, row: int) -> None:
        for cache in self._caches:
            cache.clear(row)

    @override
    def swap(self, row: int, other: int, lengths: tuple[int, int]) -> None:
        for cache in self._caches:
            cache.swap(row, other, lengths)

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
        pass

    @override
    def save_state(self, row: int, slot: int) -> None:
        pass

    @override
    def load_state(self, row: int, slot: int) -> None:
        pass


class TrtRanks(DeviceBackend):
    """Runs the plans of several ranks, each on its GPU and in its thread."""

    def __init__(
        self, directory: Path, config: EngineConfig, devices: Sequence[Device], capabilities: Sequence[str]
    ) -> None:
        """Load the plan of rank r onto ``devices[r]``. Raises EngineDirError and BackendError."""
        self.config = config
        self.device, self.devices = devices[0], devices
        self._threads = ThreadPoolExecutor(len(devices), "rank")
        self._lost = ""
        """Why the ranks have stopped; empty while they work."""
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
        """A CUDA graph has the work of one GPU."""
        return False

    @property
    @override
    def workspace_bytes(self) -> int:
        """Bytes for the rank that needs most."""
        return max(rank.workspace_bytes for rank in self._ranks)

    @override
    def allocate_cache(self) -> None:
        """The other ranks also get memory for inputs and logits."""
        for rank in self._ranks:
            rank.allocate_cache()
        self.cache = RanksKVCache([rank.cache for rank in self._ranks])
        profiles, vocab = self.config.build_config.profiles, self.config.graph.vocab_size
        rows = self.config.build_config.max_batch_size
        tokens, num_logits = (max(getattr(profile, name)[2] for profile in profiles) for name in ("sequence", "logits"))
        for rank in self._ranks[1:]:
            zeros = rank.device.zeros
            sizes = ((rows, tokens), (rows,), (rows, num_logits))
            self._feeds.append(Feed(*(zeros(size, np.int64) for size in sizes)))
            self._logits.append(zeros((rows, num_logits, vocab), np.float32))

    @override
    def enqueue(self, feed: Feed, logits: DeviceArray, first: int, fixed: bool) -> None:
        """Later work on the first rank's GPU waits for all ranks."""
        work = [partial(self._ranks[0].enqueue, feed, logits, first, fixed)]
        for rank, rank_inputs, rank_logits in zip(self._ranks[1:], self._feeds, self._logits, strict=True):
            rank.device.wait_for(self.device)
            rank_feed = Feed(*(array.part(0, source.shape) for array, source in zip(rank_inputs, feed, strict=True)))
            for array, source in zip(rank_feed, feed, strict=True):
                rank.device.copy(array, source)
            work.append(partial(rank.enqueue, rank_feed, rank_logits.part(0, logits.shape), first, fixed))
        self._run(work)
        for rank in self._ranks[1:]:
            self.device.wait_for(rank.device)

    def _run(self, work: Sequence[Callable[[], None]]) -> None:
        """Run each rank's work in its own thread. Raises EngineLostError where ranks wait for one that failed."""
        if self._lost:
            raise EngineLostError(self._lost)
        futures = [self._threads.submit(enqueue) for enqueue in work]
        errors = {rank: error for rank, future in enumerate(futures) if (error := future.exception())}
        if not errors:
            return
        rank, error = next(iter(errors.items()))
        if len(errors) == len(work) or self._communicators is None:  # No rank waits for another one.
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
