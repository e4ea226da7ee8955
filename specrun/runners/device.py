"""One model on a device: what ``ModelRunner`` is on the host."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specrun.backends import DeviceBackend, Feed
from specrun.devices import DeviceArray
from specrun.errors import BackendError
from specrun.kernels import calls
from specrun.kernels.layout import MAX_VOCAB
from specrun.kv_cache.rows import CacheRows
from specrun.runners.device_batch import DeviceRows
from specrun.runners.host import build_inputs


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
        """Give the prefix cache ``blocks`` blocks, before any request."""
        self.backend.cache.allocate_pool(blocks)
        self.rows = CacheRows(self.backend.cache)

    def warm_up(self, rows: int) -> None:
        """Queue prompts of every batch size up to ``rows``. A new request clears what they leave in its row.

        An engine that does not tell the size of its workspace allocates it now: so one prompt has the full length.
        """
        longest = 1 if self.backend.workspace_bytes else self.backend.config.build_config.max_input_len
        for batch in range(rows, 0, -1):
            feed = self._feed(batch, longest if batch == rows else 1, 1)
            for array in feed:
                self.device.clear(array)
            self.backend.enqueue(feed, self._step_logits(batch, 0, 1), 0, fixed=False)

    def prefill(self, token_ids: Sequence[Sequence[int]], first: int, max_tokens: int) -> None:
        """See ``ModelRunner.prefill``."""
        max_tokens = min(max_tokens, self.backend.config.build_config.max_input_len)
        if chunk := self.rows.next_chunk(token_ids, first, max_tokens):
            own = slice(first, first + len(token_ids))
            num_logits, capacity = [0] * len(token_ids), self.backend.cache.length
            values = build_inputs(
                chunk, [()] * len(token_ids), self.rows.lengths[own], num_logits, capacity, self.vocab
            )
            feed = self._feed(len(token_ids), len(values.input_ids[0]), 1)
            for array, content in zip(feed, values, strict=True):
                self.device.write(array, np.array(content, np.int64))
            self.backend.enqueue(feed, self._step_logits(len(token_ids), 0, 1), first, fixed=False)
            self.rows.lengths[own] = map(len, chunk)

    def forward(
        self,
        batch: int,
        rows: DeviceRows,
        offset: int,
        query_len: int,
        first_logit: int,
        num_logits: int,
        step: int = 0,
    ) -> DeviceArray:
        """Queue a call that feeds ``query_len`` tokens of every row, from position length + ``offset`` on.

        Returns the logits of ``num_logits`` positions, from length + ``first_logit`` on. A verify pass of draft_len g
        feeds the last committed token and the drafts, and returns all logits: (-1, g + 1, -1, g + 1). See the kernel
        ``feed``.
        """
        feed = self._feed(batch, query_len, num_logits)
        calls.feed(
            rows,
            offset=offset,
            first_logit=first_logit,
            capacity=self.backend.cache.length,
            vocab=self.vocab,
            input_ids=feed.input_ids,
            write_indices=feed.write_indices,
            logits_indices=feed.logits_indices,
        )
        logits = self._step_logits(batch, step, num_logits)
        self.backend.enqueue(feed, logits, 0, fixed=True)
        return logits

    def _step_logits(self, batch: int, step: int, num_logits: int) -> DeviceArray:
        return self.logits.part(step * self.step_stride, (batch, num_logits, self.vocab))

    def _feed(self, batch: int, query_len: int, num_logits: int) -> Feed:
        return Feed(
            self.input_ids.part(0, (batch, query_len)),
            self.write_indices.part(0, (batch,)),
            self.logits_indices.part(0, (batch, num_logits)),
        )
