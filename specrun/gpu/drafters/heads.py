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
from specrun.gpu.kernels.calls import RowState
from specrun.gpu.rows import DeviceRows
from specrun.request.request import Outcome


class DeviceHeadDrafter(DeviceModelDrafter):
    """It is on the target's device. The first step of a round reads all that it may lack.

    Its tokens are not masked: of a reduced vocabulary a mask may leave nothing, which would count as a failure.
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
    """See ``DeviceDrafter``. Rounds have the same length in all rows, so confidence ends no draft."""

    def __init__(self, backend: DeviceBackend, rows: DeviceRows, markov: Markov | None = None) -> None:
        """rows: the round's, to which the draft tokens are written."""
        self._graph = backend.config.graph
        super().__init__(backend, rows)
        self._markov = DeviceMarkov(markov, backend.device) if markov else None

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
        """Nothing of the block stays, which began with the last committed token."""
        return -1

    @override
    def _draft(self, batch: int, draft_len: int, steps: range, masks: DeviceArray | None = None) -> None:
        """What is fed after the last committed token is ignored."""
        from_anchor, vocab = self._graph.sample_from_anchor, self.runner.vocab
        offset = -self._first_step_len(draft_len) if self._graph.caches else -1
        query_len = draft_len - from_anchor - offset
        logits = self.runner.forward(batch, self._rows, offset, query_len, -int(from_anchor), draft_len)
        for step in steps:
            # A column: a row's logits of this token lie in front of those of the next, and only they are looked at.
            own = replace(logits.part(step * vocab, (1,)), shape=(batch, 1, draft_len * vocab))
            if self._markov:
                self._markov.apply(self._rows, own, step)
            self._sample(own, step, draft_len)


class DeviceMarkov:
    """The matrices of ``Markov`` on a device."""

    def __init__(self, markov: Markov, device: Device) -> None:
        self._w1, self._w2 = _sent(markov.w1, device), _sent(markov.w2, device)

    def apply(self, rows: RowState, logits: DeviceArray, step: int) -> None:
        """Queue the bias on ``logits`` [batch, 1, stride] of each row's draft token ``step``, in place."""
        calls.apply_markov(rows, logits=logits, step=step, w1=self._w1, w2=self._w2)


def _sent(matrix: npt.NDArray[np.float32], device: Device) -> DeviceArray:
    array = device.zeros(matrix.shape, matrix.dtype)
    device.write(array, matrix)
    return array
