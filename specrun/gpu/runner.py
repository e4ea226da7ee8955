"""One model on a device and its cache, as ``ModelRunner`` is on the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from specrun.devices import DeviceArray
from specrun.errors import BackendError, SpecError
from specrun.gpu.backend import DeviceBackend, Feed
from specrun.gpu.kernels import calls
from specrun.gpu.kernels.layout import MAX_VOCAB
from specrun.gpu.rows import DeviceRows
from specrun.kv_cache.rows import rows_of
from specrun.request.request import Outcome, Request
from specrun.runners.host_runner import build_inputs
from specrun.sampling.sampler import Floats


@dataclass
class _Indices:
    """The ``StateIndices`` of a pass of prompts."""

    state_indices: npt.NDArray[np.int64]
    keep_indices: npt.NDArray[np.int64]


class DeviceRunner:
    """Feeds one model on its device. Owns the memory of the model's inputs and logits."""

    def __init__(
        self, backend: DeviceBackend, rows: int, query_len: int, num_logits: int, steps: int, held_back: int = 0
    ) -> None:
        """Allocate all memory for at most ``rows`` rows, except the prefix cache.

        query_len, num_logits: the most tokens and logits of a row in one call of a round. steps: how many calls have
        logits in memory at the same time. held_back: how many of a row's committed tokens a round leaves unread by
        recurrent states, because the next one feeds them again. Raises BackendError where memory is short or the
        vocabulary is too large.
        """
        build = backend.config.build_config
        self.backend = backend
        self.device = backend.device
        self.vocab = backend.config.graph.vocab_size
        if self.vocab > MAX_VOCAB:
            raise BackendError(f"a vocabulary of {self.vocab} ids: the kernels support at most {MAX_VOCAB}")
        backend.allocate_cache()
        self.rows = rows_of(backend.cache, backend.config.graph)
        self._states = backend.cache.states
        self._held_back = held_back
        self.input_ids = self.device.zeros((rows, max(query_len, build.max_input_len)), np.int64)
        self.write_indices = self.device.zeros((rows,), np.int64)
        self.logits_indices = self.device.zeros((rows, num_logits), np.int64)
        # Engines need aligned addresses, so the logits of a step begin at a multiple of 256 bytes.
        self.step_stride = -(-rows * num_logits * self.vocab // 64) * 64
        self.logits = self.device.zeros((steps, self.step_stride), np.float32)
        self._pinned: Floats | None = None
        """Host memory for logits; None before the first ``read_logits``."""

    def allocate_pool(self, blocks: int) -> None:
        """Give the prefix cache ``blocks`` blocks, before any request."""
        self.backend.cache.allocate_pool(blocks)
        self.rows = rows_of(self.backend.cache, self.backend.config.graph)

    def warm_up(self, rows: int) -> None:
        """Queue prompts of every batch size up to ``rows``. Admitting a request clears its row afterwards.

        An engine whose workspace size is unknown allocates its workspace now. So one of its prompts has full length.
        """
        longest = 1 if self.backend.workspace_bytes else self.backend.config.max_query_len
        for batch in range(rows, 0, -1):
            feed = self._feed(batch, longest if batch == rows else 1, 1)
            for array in feed:
                self.device.clear(array)
            self._enqueue(feed, self._step_logits(batch, 0, 1), 0, fixed=False)

    def prefill(self, token_ids: Sequence[Sequence[int]], first: int, max_tokens: int) -> None:
        """Queue a pass that feeds up to ``max_tokens`` more tokens that the cache lacks of each row from ``first`` on.

        token_ids: the rows' whole texts. Padding follows a row's tokens. Where a row has no room for it, other models
        write earlier tokens again; recurrent states cannot read them again, so each row is fed alone.
        """
        max_tokens = min(max_tokens, self.backend.config.max_query_len)
        if chunk := self.rows.next_chunk(token_ids, first, max_tokens):
            num_logits, capacity = [0] * len(token_ids), self.backend.cache.length
            lengths = self.rows.lengths[first : first + len(token_ids)]
            longest = max(len(tokens) - length for tokens, length in zip(chunk, lengths, strict=True))
            if self._states and len(token_ids) > 1 and max(lengths) + longest > capacity:
                for row, tokens in enumerate(token_ids, first):
                    self.prefill([tokens], row, max_tokens)
                return
            values = build_inputs(
                chunk,
                [()] * len(token_ids),
                lengths,
                num_logits,
                capacity,
                self.vocab,
                nothing_wanted=self.backend.config.graph.nothing_wanted,
            )
            feed = self._feed(len(token_ids), len(values.input_ids[0]), 1)
            for array, content in zip(feed, values, strict=True):
                self.device.write(array, np.array(content, np.int64))
            if self._states:
                indices = _Indices(*np.zeros((2, len(token_ids)), np.int64))
                self.rows.begin(indices, first, chunk, whole_blocks=True)
                self._states.write_indices(indices.state_indices, indices.keep_indices)
            self._enqueue(feed, self._step_logits(len(token_ids), 0, 1), first, fixed=False)
            self.rows.set_lengths(first, list(map(len, chunk)))

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
        """Queue a call that feeds ``query_len`` tokens of each of ``rows`` 0 to ``batch``. See the kernel ``feed``.

        The first token fed stands at position length + ``offset``, where length counts the row's committed tokens.
        Returns float32 logits [batch, num_logits, V] of the positions from length + ``first_logit`` on. They stay in
        memory until the next call with the same ``step``.

        Example: a verify pass of draft_len g feeds the last committed token and the draft tokens, and returns all their
        logits. Its offset and first_logit are -1, its query_len and num_logits g + 1.
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
        if self._states:
            self._states.begin(rows, feed.write_indices, self._held_back)
        logits = self._step_logits(batch, step, num_logits)
        self._enqueue(feed, logits, 0, fixed=True)
        return logits

    def read_logits(self, chunk: Sequence[int], start: int, row: int, num_logits: int) -> Floats:
        """Feed tokens to positions from ``start`` on of a row, and wait.

        Returns logits [num_logits, V] of the first ones. Not for recurrent layers.
        """
        feed = self._feed(1, len(chunk), num_logits)
        values = [np.minimum([chunk], self.vocab - 1), [start], [range(num_logits)]]
        for array, content in zip(feed, values, strict=True):
            self.device.write(array, np.array(content, np.int64))
        logits = self._step_logits(1, 0, num_logits)
        self.backend.enqueue(feed, logits, row, fixed=False)
        if self._pinned is None:
            self._pinned = self.device.pinned_like(self._step_logits(1, 0, self.logits_indices.shape[1]))
        host_logits: Floats = self._pinned[0, :num_logits]
        self.device.copy_to_host(logits, host_logits)
        self.device.wait()
        return host_logits.copy()

    def end_round(self, row: int, request: Request, outcome: Outcome | SpecError, num_read: int) -> None:
        """Note how many tokens of ``row`` the cache holds after a round. Call it before the outcome is committed.

        num_read: number of accepted draft tokens in the cache. The cache of a request that failed or ended on the host
        may hold more than its text.
        """
        committed = len(request.tokens)
        read = max(0, committed - self._held_back) if isinstance(outcome, Outcome) else 0
        self.rows.end_round(row, committed + num_read, read)

    def _enqueue(self, feed: Feed, logits: DeviceArray, first: int, fixed: bool) -> None:
        self.backend.enqueue(feed, logits, first, fixed)
        if self._states:
            self._states.take(first, feed.write_indices.shape[0])

    def _step_logits(self, batch: int, step: int, num_logits: int) -> DeviceArray:
        return self.logits.part(step * self.step_stride, (batch, num_logits, self.vocab))

    def _feed(self, batch: int, query_len: int, num_logits: int) -> Feed:
        return Feed(
            self.input_ids.part(0, (batch, query_len)),
            self.write_indices.part(0, (batch,)),
            self.logits_indices.part(0, (batch, num_logits)),
        )
