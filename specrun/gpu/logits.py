"""A target's logits on the host, for those who compare texts with them: the counterpart of ``ModelRunner``'s."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from typing_extensions import override

from specrun.errors import BackendError
from specrun.gpu.runner import DeviceRunner
from specrun.sampling.sampler import Floats
from specrun.speculative.round import TargetLogits


class DeviceLogits(TargetLogits):
    """See ``TargetLogits``. Feeds rows one by one, and waits for each pass. Overwrites what rounds left in them."""

    def __init__(self, runner: DeviceRunner) -> None:
        """Raises BackendError for recurrent layers, whose states rounds own."""
        if runner.backend.config.graph.states:
            raise BackendError("logits of recurrent layers are read on CPUs only: give an engine for the CPU")
        self.vocab_size = runner.vocab
        self._runner = runner
        self._lengths: list[int] = []
        self._most_logits = runner.logits_indices.shape[1]

    @override
    def reserve(self, num_rows: int, length: int) -> None:
        self._lengths = [0] * num_rows

    @override
    def forward(self, token_ids: Sequence[Sequence[int]], num_logits: Sequence[int]) -> Floats:
        found = np.zeros((len(token_ids), max(num_logits), self.vocab_size), np.float32)
        for row, (tokens, wanted) in enumerate(zip(token_ids, num_logits, strict=True)):
            self._read(tokens[: len(tokens) - wanted], row)
            for number in range(wanted):
                found[row, number] = self.score(tokens, row, 1)[0]
        return found

    @override
    def score(self, token_ids: Sequence[int], row: int, max_tokens: int) -> Floats:
        found, end = [], min(len(token_ids), self._lengths[row] + max_tokens)
        while (start := self._lengths[row]) < end:
            chunk = token_ids[start : min(end, start + self._most_logits)]
            found.append(self._feed(chunk, row, len(chunk)))
        return np.concatenate(found)

    def _read(self, token_ids: Sequence[int], row: int) -> None:
        """Feed tokens that the cache lacks."""
        most = self._runner.backend.config.max_query_len
        while (start := self._lengths[row]) < len(token_ids):
            self._feed(token_ids[start : start + most], row, 1)

    def _feed(self, chunk: Sequence[int], row: int, wanted: int) -> Floats:
        """Feed tokens of a row. Returns the logits of the first ``wanted``."""
        logits = self._runner.read_logits(chunk, self._lengths[row], row, wanted)
        self._lengths[row] += len(chunk)
        return logits
