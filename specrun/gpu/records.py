"""The records that the kernels write of a round. The host reads nothing else of it."""

from __future__ import annotations

import math

import numpy as np

from specrun.devices import Device, DeviceArray
from specrun.errors import BackendError, RequestError, SpecError
from specrun.gpu.kernels.layout import TOKEN_VALUE, record_len
from specrun.request.request import Outcome, Request
from specrun.sampling.limits import MAX_LOGPROBS
from specrun.sampling.sampler import NON_FINITE_LOGITS, TokenLogprob


class DeviceRecords:
    """Each row's record and log-probabilities, in one piece of device memory: one copy brings them to the host."""

    def __init__(self, device: Device, rows: int, draft_len: int) -> None:
        """rows, draft_len: the most rows, and draft tokens of a row."""
        self.device = device
        self.first_logprob = rows * record_len(draft_len)
        size = self.first_logprob + rows * (draft_len + 1) * (1 + MAX_LOGPROBS)
        self.memory = device.zeros((size,), np.int64)  # A TOKEN_VALUE has 8 bytes too.

    def of(self, batch: int, draft_len: int) -> tuple[DeviceArray, DeviceArray]:
        """The memory that a round's kernels write: int64 records [batch, record_len], and log-probabilities.

        These are TOKEN_VALUEs [batch, draft_len + 1, 1 + MAX_LOGPROBS].
        """
        positions = (batch, draft_len + 1, 1 + MAX_LOGPROBS)
        return self.memory.part(0, (batch, record_len(draft_len))), self.memory.part(self.first_logprob, positions)


class QueuedRound:
    """A queued round: its time, and its records on the host. A later round uses the object again.

    Each object has its own memory for the records, so they stay while the device works on another round.
    """

    def __init__(self, records: DeviceRecords) -> None:
        self.draft_len = -1
        """Draft length of the latest round; -1 before the first."""
        self.is_steady_state = False
        """False while this shape is warming up; its time is then ignored."""
        self._records = records
        self._pinned = records.device.pinned_like(records.memory)
        self._began, self._ended = records.device.event(), records.device.event()

    def begin(self) -> None:
        """Queue the event of its begin, before its work."""
        self._began.record()

    def end(self, batch: int, draft_len: int, is_steady_state: bool) -> None:
        """Queue the copy of its records behind its work."""
        self.draft_len, self.is_steady_state = draft_len, is_steady_state
        size = self._records.first_logprob + batch * (draft_len + 1) * (1 + MAX_LOGPROBS)
        self._records.device.copy_to_host(self._records.memory.part(0, (size,)), self._pinned[:size])
        self._ended.record()

    def wait(self) -> None:
        """Return when its records are on the host."""
        self._ended.wait()

    @property
    def seconds(self) -> float:
        """Seconds that the device took for it. Call ``wait`` first."""
        return self._ended.seconds_since(self._began)

    def outcome(self, row: int, request: Request) -> Outcome | SpecError:
        """The outcome of ``request`` in the record of its ``row``. Call ``wait`` first.

        It is a BackendError where the target's logits are not finite, and a RequestError for a request that had ended.
        """
        if request.finish_reason:
            return RequestError("the request ended before its last round was read")
        length = record_len(self.draft_len)
        drafted, accepted, next_token, *drafts = self._pinned[row * length : (row + 1) * length].tolist()
        if next_token < 0:
            return BackendError(NON_FINITE_LOGITS)
        logprobs = None
        if request.options.logprobs is not None:
            logprobs = self._logprobs(row * (self.draft_len + 1), accepted + 1, request.options.logprobs)
            if any(math.isnan(logprob) for logprob, _ in logprobs):
                return BackendError(NON_FINITE_LOGITS)
        return Outcome(drafted, drafts[:accepted], next_token, logprobs)

    def _logprobs(self, first: int, count: int, top: int) -> list[TokenLogprob]:
        """The log-probabilities of ``count`` positions from ``first`` on; see ``log_probabilities`` in round.cu."""
        values = self._pinned[self._records.first_logprob :].view(TOKEN_VALUE).reshape(-1, 1 + MAX_LOGPROBS)
        return [
            # A vocabulary may have fewer than ``top`` ids.
            TokenLogprob(chosen, [(token, value) for token, value in likeliest[:top] if token >= 0 and value > -np.inf])
            for (_, chosen), *likeliest in values[first : first + count].tolist()
        ]
