"""A drafter on the host for a round on a device: its tokens are uploaded between drafting and verifying."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from typing_extensions import override

from specrun.devices import Device, DeviceArray
from specrun.drafters import Drafter
from specrun.drafters.draft_plan import DraftPlan
from specrun.errors import SpecError
from specrun.gpu.drafters import DeviceDrafter, DraftProbs
from specrun.gpu.kernels import calls
from specrun.gpu.kernels.layout import DISTRIBUTION
from specrun.gpu.rows import DeviceRows
from specrun.request.request import Outcome, Request


class UploadedDrafter(DeviceDrafter):
    """A host drafter. Acceptance treats its drafts as deterministic, even if they were sampled.

    That is exact: a token that does not depend on the target's noise is accepted with its probability p, and its
    replacement is drawn from p without it. A draft model's probabilities would accept more, but are not uploaded.
    """

    needs_host = True

    def __init__(self, drafter: Drafter, rows: DeviceRows) -> None:
        """rows: the round's, to which the draft tokens are written."""
        self.drafter = drafter
        self.texts = drafter.texts
        self.devices: Sequence[Device] = [rows.device]
        self._rows = rows
        distributions = rows.device.zeros((rows.max_rows, rows.max_draft_len), DISTRIBUTION)
        no_logits = rows.device.zeros((1,), np.float32)  # Acceptance reads no logits of deterministic drafts.
        self._probs = DraftProbs(distributions, no_logits, 0, 0, rows.vocab)
        self._uploads = rows.device.zeros((rows.max_rows, 1 + rows.max_draft_len), np.int64)

    @override
    def probs(self, draft_len: int) -> DraftProbs:
        return self._probs

    @override
    def prepare(self, requests: Sequence[Request], plan: DraftPlan) -> int:
        if not plan.draft_len:
            return 0
        proposals = self.drafter.propose(requests, plan, [()] * len(requests))
        drafts = [proposal.tokens for proposal in proposals]
        length = max(map(len, drafts))
        if length:
            uploads = np.zeros((self._rows.batch_size(len(requests)), 1 + length), np.int64)
            for row, tokens in enumerate(drafts):
                uploads[row, : 1 + len(tokens)] = len(tokens), *tokens
            self._rows.device.write(self._uploads.part(0, uploads.shape), uploads)
        return length

    @override
    def queue(self, batch: int, draft_len: int, steps: range, masks: DeviceArray | None) -> None:
        """``masks`` are not used: the host's drafter applies them."""
        uploads = self._uploads.part(0, (batch, 1 + draft_len))
        calls.place_drafts(self._rows, uploads=uploads, q=self._probs.distributions)

    @override
    def admit(self, requests: Sequence[Request]) -> None:
        self.drafter.admit(requests)

    @override
    def release(self, request: Request) -> None:
        self.drafter.release(request)

    @override
    def ends_drafts(self, requests: Sequence[Request]) -> bool:
        return self.drafter.ends_drafts(requests)

    @override
    def observe(self, requests: Sequence[Request], outcomes: Sequence[Outcome | SpecError], draft_len: int) -> None:
        self.drafter.observe(requests, outcomes, draft_len)
