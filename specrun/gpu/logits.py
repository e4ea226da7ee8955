"""The target's logits, copied to the host for ``verify`` and ``score``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from typing_extensions import override

from specrun.errors import BackendError
from specrun.gpu.runner import DeviceRunner
from specrun.sampling.sampler import Floats
from specrun.speculative.round import TargetLogits


class DeviceLogits(TargetLogits):
    """Feeds rows one by one, and waits for each pass. It overwrites the cache rows of rounds."""

    def __init__(self, runner: DeviceRunner) -> None:
        """Raises BackendError for recurrent layers, whose states belong to rounds."""
        if runner.backend.config.graph.states:
            raise BackendError("logits of recurrent layers are read on CPUs only: give an engine for the CPU")
        self.vocab_size = runner.vocab
        self._runner = runner
        self._lengths: list[int] = []
        self._max_logits = runner.logits_indices.shape[1]

    @override
    def reserve(self, num_rows: int, length: int) -> None:
        self._lengths = [0] * num_rows

    @override
    def forward(self, token_ids: Sequence[Sequence[int]], num_logits: Sequence[int]) -> Floats:
        logits = np.zeros((len(token_ids), max(num_logits), self.vocab_size), np.float32)
        for row, (tokens, count) in enumerate(zip(token_ids, num_logits, strict=True)):
            self._read(tokens[: len(tokens) - count], row)
            for number in range(count):
                logits[row, number] = self.score(tokens, row, 1)[0]
        return logits

    @override
    def score(self, token_ids: Sequence[int], row: int, max_tokens: int) -> Floats:
        logits, end = [], min(len(token_ids), self._lengths[row] + max_tokens)
        while (start := self._lengths[row]) < end:
            chunk = token_ids[start : min(end, start + self._max_logits)]
            logits.append(self._feed(chunk, row, len(chunk)))
        return np.concatenate(logits)

    def _read(self, token_ids: Sequence[int], row: int) -> None:
        """Feed tokens that the cache lacks."""
        max_len = self._runner.backend.config.max_query_len
        while (start := self._lengths[row]) < len(token_ids):
            self._feed(token_ids[start : start + max_len], row, 1)

    def _feed(self, chunk: Sequence[int], row: int, num_logits: int) -> Floats:
        """Feed tokens of a row. Returns the logits of the first ``num_logits``."""
        logits = self._runner.read_logits(chunk, self._lengths[row], row, num_logits)
        self._lengths[row] += len(chunk)
        return logits
