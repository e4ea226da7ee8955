"""What the kernels record of a round, which is all that the host reads of it."""

from __future__ import annotations

import math

import numpy as np

from specrun.devices import Device, DeviceArray
from specrun.errors import BackendError, SpecError
from specrun.kernels.layout import TOKEN_VALUE, record_len
from specrun.limits import MAX_LOGPROBS
from specrun.request import Outcome, Request
from specrun.sampling import NON_FINITE_LOGITS, TokenLogprob


class DeviceRecords:
    """Each row's record and log-probabilities. They lie in one piece of memory, so one copy brings them to the host."""

    def __init__(self, device: Device, rows: int, draft_len: int) -> None:
        """For ``rows`` rows and ``draft_len`` draft tokens at most."""
        self.device = device
        self._first_logprob = rows * record_len(draft_len)
        size = self._first_logprob + rows * (draft_len + 1) * (1 + MAX_LOGPROBS)
        self._memory = device.zeros((size,), np.int64)  # A TOKEN_VALUE has 8 bytes too.
        self._pinned = device.pinned_like(self._memory)

    def of(self, batch: int, draft_len: int) -> tuple[DeviceArray, DeviceArray]:
        """Where a round's kernels write: int64 records [batch, record_len], and log-probabilities.

        These are TOKEN_VALUEs [batch, draft_len + 1, 1 + MAX_LOGPROBS].
        """
        positions = (batch, draft_len + 1, 1 + MAX_LOGPROBS)
        return self._memory.part(0, (batch, record_len(draft_len))), self._memory.part(self._first_logprob, positions)

    def copy_to_host(self, batch: int, draft_len: int) -> None:
        """Queue the copy of a round's records to the host."""
        size = self._first_logprob + batch * (draft_len + 1) * (1 + MAX_LOGPROBS)
        self.device.copy_to_host(self._memory.part(0, (size,)), self._pinned[:size])

    def outcome(self, row: int, request: Request, draft_len: int) -> Outcome | SpecError:
        """What a row's record decides for ``request``, once it was copied to the host and the device was waited for.

        It is a BackendError where the target's logits are not finite.
        """
        length = record_len(draft_len)
        drafted, accepted, next_token, *drafts = self._pinned[row * length : (row + 1) * length].tolist()
        if next_token < 0:
            return BackendError(NON_FINITE_LOGITS)
        logprobs = None
        if request.logprobs is not None:
            logprobs = self._logprobs(row * (draft_len + 1), accepted + 1, request.logprobs)
            if any(math.isnan(logprob) for logprob, _ in logprobs):
                return BackendError(NON_FINITE_LOGITS)
        return Outcome(drafted, drafts[:accepted], next_token, logprobs)

    def _logprobs(self, first: int, count: int, top: int) -> list[TokenLogprob]:
        """The log-probabilities of ``count`` positions from ``first`` on; see ``log_probabilities`` in round.cu."""
        found = self._pinned[self._first_logprob :].view(TOKEN_VALUE).reshape(-1, 1 + MAX_LOGPROBS)
        return [
            # A vocabulary may have fewer ids than are wanted.
            TokenLogprob(own, [(token, value) for token, value in likeliest[:top] if token >= 0 and value > -np.inf])
            for (_, own), *likeliest in found[first : first + count].tolist()
        ]
