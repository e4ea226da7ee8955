"""Draft heads on the target's device; see ``specrun.drafters.head`` and ``specrun.drafters.block_head``."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from specrun.devices import Device, DeviceArray
from specrun.drafters.markov import Markov
from specrun.errors import SpecError
from specrun.gpu.backend import DeviceBackend
from specrun.gpu.drafters import DraftProbs
from specrun.gpu.drafters.model import DeviceModelDrafter
from specrun.gpu.kernels import calls
from specrun.gpu.rows import DeviceRows
from specrun.request.request import Outcome


class DeviceHeadDrafter(DeviceModelDrafter):
    """A head on the target's device. The first step of a round reads all tokens that it may lack.

    Its tokens are not masked: a mask may allow no token of a reduced vocabulary, which would count as a failure.
    """

    draws_one_by_one = False
    keeps_to_target = True

    @override
    def _first_step_len(self, draft_len: int) -> int:
        return draft_len + 1

    @override
    def _num_read(self, outcome: Outcome | SpecError) -> int:
        return 0


class DeviceParallelDrafter(DeviceHeadDrafter):
    """A head that drafts all tokens in one pass. All rows have the same draft length, so confidence ends no draft."""

    def __init__(self, backend: DeviceBackend, rows: DeviceRows, markov: Markov | None = None) -> None:
        """rows: the round's, to which the draft tokens are written."""
        self._graph = backend.config.graph
        super().__init__(backend, rows)
        self._markov = [_upload(matrix, backend.device) for matrix in (markov.w1, markov.w2)] if markov else None

    @override
    def probs(self, draft_len: int) -> DraftProbs:
        """The logits of a row lie together."""
        vocab = self.runner.vocab
        return replace(self._drawn, step_stride=vocab, row_stride=draft_len * vocab)

    @override
    def _passes(self, draft_len: int) -> tuple[int, int]:
        return draft_len, 1

    @override
    def _first_step_len(self, draft_len: int) -> int:
        return self._graph.reread_len(draft_len)

    @override
    def _query_len(self, draft_len: int) -> int:
        return self._graph.round_len(draft_len)

    @override
    def _num_read(self, outcome: Outcome | SpecError) -> int:
        """The cache keeps nothing of a block, which begins with the last committed token."""
        return -1

    @override
    def _draft(self, batch: int, draft_len: int, steps: range, masks: DeviceArray | None = None) -> None:
        """The model ignores the ids after the last committed token."""
        from_anchor, vocab = self._graph.sample_from_anchor, self.runner.vocab
        offset = -self._first_step_len(draft_len) if self._graph.caches else -1
        query_len = draft_len - from_anchor - offset
        logits = self.runner.forward(batch, self._rows, offset, query_len, -int(from_anchor), draft_len)
        for step in steps:
            # A column: each row's logits of this token, with those of the next tokens behind them.
            column = replace(logits.part(step * vocab, (1,)), shape=(batch, 1, draft_len * vocab))
            if self._markov:
                calls.apply_markov(self._rows, logits=column, step=step, w1=self._markov[0], w2=self._markov[1])
            self._sample(column, step, draft_len)


def _upload(matrix: npt.NDArray[np.float32], device: Device) -> DeviceArray:
    array = device.zeros(matrix.shape, matrix.dtype)
    device.write(array, matrix)
    return array
