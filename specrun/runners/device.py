"""One model on a device: what ``ModelRunner`` is on the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specrun.backends import DeviceBackend, Feed
from specrun.devices import DeviceArray
from specrun.errors import BackendError
from specrun.kernels import MAX_VOCAB
from specrun.kv_cache.rows import CacheRows
from specrun.runners.device_batch import DeviceRows
from specrun.runners.host import arrange


class DeviceRunner:
    """Feeds one model on its device, and owns the memory it is fed from."""

    def __init__(self, backend: DeviceBackend, rows: int, query_len: int, num_logits: int, steps: int) -> None:
        """Allocate what ``rows`` rows at most need, but for the prefix cache. Raises BackendError.

        query_len, num_logits: most tokens and logits of a row in one call of a round; steps: calls whose logits are
        kept.
        """
        build = backend.config.build_config
        self.backend = backend
        self.device = backend.device
        self.vocab = backend.config.graph.vocab_size
        if self.vocab > MAX_VOCAB:
            raise BackendError(f"a vocabulary of {self.vocab}; the kernels serve at most {MAX_VOCAB}")
        backend.allocate_cache()
        self.rows = CacheRows(backend.cache)
        self.input_ids = self.device.zeros((rows, max(query_len, build.max_input_len)), np.int64)
        self.write_indices = self.device.zeros((rows,), np.int64)
        self.logits_indices = self.device.zeros((rows, num_logits), np.int64)
        # Engines want aligned addresses: a step's logits begin at a multiple of 256 bytes.
        self.step_stride = -(-rows * num_logits * self.vocab // 64) * 64
        self.logits = self.device.zeros((steps, self.step_stride), np.float32)

    def allocate_pool(self, blocks: int) -> None:
        """Have room for ``blocks`` blocks of past texts, before there are any."""
        self.backend.cache.allocate_pool(blocks)
        self.rows = CacheRows(self.backend.cache)

    def warm_up(self, rows: int) -> None:
        """Queue prompts of every batch size up to ``rows``. What they leave in the cache, new texts clear away.

        An engine that does not tell its workspace takes it now: then one prompt is as long as they get.
        """
        longest = 1 if self.backend.workspace_bytes else self.backend.config.build_config.max_input_len
        for batch in range(rows, 0, -1):
            feed = self._feed(batch, longest if batch == rows else 1, 1)
            for array in feed:
                self.device.clear(array)
            self.backend.enqueue(feed, self._step_logits(batch, 0, 1), 0, fixed=False)

    def read(self, texts: Sequence[Sequence[int]], first: int, most: int) -> None:
        """See ``ModelRunner.read``."""
        most = min(most, self.backend.config.build_config.max_input_len)
        if pieces := self.rows.next_piece(texts, first, most):
            own = slice(first, first + len(texts))
            wanted, room = [0] * len(texts), self.backend.cache.length
            values = arrange(pieces, [()] * len(texts), self.rows.lengths[own], wanted, room, self.vocab)
            feed = self._feed(len(texts), len(values.input_ids[0]), 1)
            for array, content in zip(feed, values, strict=True):
                self.device.write(array, np.array(content, np.int64))
            self.backend.enqueue(feed, self._step_logits(len(texts), 0, 1), first, fixed=False)
            self.rows.lengths[own] = map(len, pieces)

    def forward(
        self,
        batch: int,
        rows: DeviceRows,
        offset: int,
        count: int,
        keep_from: int,
        kept: int,
        step: int = 0,
    ) -> DeviceArray:
        """Queue a call that feeds ``count`` tokens of every row, from its length + ``offset`` on.

        The logits of ``kept`` positions come back, the first at length + ``keep_from``. A verify pass of draft_len g
        feeds the last committed token and the drafts, and keeps all: (-1, g + 1, -1, g + 1). See the kernel ``feed``.
        """
        feed = self._feed(batch, count, kept)
        source, room = (rows.tokens, rows.width, rows.progress), self.backend.cache.length
        self.device.launch("feed", (batch, 1, 1), *source, offset, count, keep_from, kept, room, self.vocab, *feed)
        logits = self._step_logits(batch, step, kept)
        self.backend.enqueue(feed, logits, 0, fixed=True)
        return logits

    def _step_logits(self, batch: int, step: int, kept: int) -> DeviceArray:
        return self.logits.part(step * self.step_stride, (batch, kept, self.vocab))

    def _feed(self, batch: int, count: int, kept: int) -> Feed:
        return Feed(
            self.input_ids.part(0, (batch, count)),
            self.write_indices.part(0, (batch,)),
            self.logits_indices.part(0, (batch, kept)),
        )
