"""A draft model on the target's device, or on another one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from typing_extensions import override

from specrun.devices import Device, DeviceArray
from specrun.drafters.draft_plan import DraftPlan
from specrun.engine_dir.contract import FIRST_DRAFT_STEP_LEN
from specrun.errors import BackendError, SpecError
from specrun.gpu.backend import DeviceBackend
from specrun.gpu.captures import Captures
from specrun.gpu.drafters import DeviceDrafter, DraftProbs
from specrun.gpu.kernels import calls
from specrun.gpu.kernels.layout import DISTRIBUTION, record_len
from specrun.gpu.rows import DeviceRows
from specrun.gpu.runner import DeviceRunner
from specrun.request.request import Outcome, Request, num_accepted
from specrun.runners.cached_texts import CachedTexts
from specrun.sampling.sampler import NON_FINITE_LOGITS


class DeviceModelDrafter(DeviceDrafter):
    """A draft model on the target's device. Drafting is captured together with the round."""

    draws_one_by_one = True
    keeps_to_target = False
    """True if it reads the target's features."""

    def __init__(self, backend: DeviceBackend, rows: DeviceRows) -> None:
        """rows: the round's, to which the draft tokens are written."""
        first_step_len = self._first_step_len(rows.max_draft_len)
        sizes = (self._query_len(rows.max_draft_len), *self._passes(rows.max_draft_len))
        self.runner = DeviceRunner(backend, rows.max_rows, *sizes, held_back=first_step_len - 1)
        self.texts = CachedTexts(self.runner, first_step_len, self.keeps_to_target)
        self.devices: Sequence[Device] = [backend.device]
        self.captured: Sequence[DeviceBackend] = [backend]
        self._rows = rows
        distributions = backend.device.zeros((rows.max_rows, rows.max_draft_len), DISTRIBUTION)
        vocab = min(self.runner.vocab, rows.vocab)  # Ids beyond the target's are never proposed.
        self._drawn = DraftProbs(distributions, self.runner.logits, self.runner.step_stride, self.runner.vocab, vocab)

    @override
    def probs(self, draft_len: int) -> DraftProbs:
        return self._drawn

    @override
    def warm_up(self) -> None:
        self.runner.warm_up(self._rows.max_rows)

    @override
    def save_kernels(self) -> None:
        self.runner.backend.save_kernels()

    @override
    def allocate_pool(self, blocks: int) -> None:
        self.runner.allocate_pool(blocks)

    @override
    def prepare(self, requests: Sequence[Request], plan: DraftPlan) -> int:
        """Prefill the tokens that the draft lacks, up to those that the first step feeds."""
        if plan.draft_len:
            texts = [request.tokens[: -self._first_step_len(plan.draft_len)] for request in requests]
            longest = max(map(len, texts))
            for row, text in enumerate(texts):
                self.runner.rows.rewind(row, len(text))
            while any(self.runner.rows.num_uncached(texts, 0)):
                self.runner.prefill(texts, 0, longest)
        return plan.draft_len

    @override
    def queue(self, batch: int, draft_len: int, steps: range, masks: DeviceArray | None) -> None:
        self._draft(batch, draft_len, steps, masks)

    @override
    def observe(self, requests: Sequence[Request], outcomes: Sequence[Outcome | SpecError], draft_len: int) -> None:
        """A row drafts fewer tokens than planned only where the draft failed.

        Constrained rows do so also where their grammar allows no token of the draft.
        """
        for row, (request, outcome) in enumerate(zip(requests, outcomes, strict=True) if draft_len else ()):
            self.runner.end_round(row, request, outcome, self._num_read(outcome))
            planned = 0 if request.matcher else request.num_draft_tokens(draft_len)
            if isinstance(outcome, Outcome) and outcome.drafted < planned:
                request.stop_drafting(BackendError(NON_FINITE_LOGITS))  # The kernel ``accept`` has stopped it too.

    def _passes(self, draft_len: int) -> tuple[int, int]:
        """Draft tokens of a row with logits in one pass, and passes in a round of ``draft_len``."""
        return 1, draft_len

    def _first_step_len(self, draft_len: int) -> int:
        """Number of tokens in the first step of a round of ``draft_len``."""
        return FIRST_DRAFT_STEP_LEN

    def _query_len(self, draft_len: int) -> int:
        """Maximum number of tokens of a row in one pass, in a round of ``draft_len``."""
        return self._first_step_len(draft_len)

    def _num_read(self, outcome: Outcome | SpecError) -> int:
        """Number of a round's accepted draft tokens in the cache. The last draft token was not fed."""
        return max(0, num_accepted(outcome) - 1)

    def _draft(self, batch: int, draft_len: int, steps: range, masks: DeviceArray | None = None) -> None:
        """Draft tokens ``steps`` of rows 0 .. batch, one step after the other."""
        rows, first = self._rows, self._first_step_len(draft_len)
        for step in steps:
            # The first step always feeds the same number of tokens: feeding one again changes nothing.
            offset, count = (-first, first) if step == 0 else (step - 1, 1)
            logits = self.runner.forward(batch, rows, offset, count, step - 1, 1, step)
            self._sample(logits, step, draft_len, masks)

    def _sample(self, logits: DeviceArray, step: int, draft_len: int, masks: DeviceArray | None = None) -> None:
        """Sample draft token ``step`` of each row from ``logits`` [batch, 1, stride]."""
        rows, drawn = self._rows, self._drawn
        vocab = drawn.vocab
        calls.apply_penalties(rows, logits=logits, vocab=vocab, first=step, draft_len=draft_len, adjusted=logits)
        if masks:
            calls.apply_masks(rows, masks=masks, vocab=vocab, adjusted=logits)
        calls.sample_draft(
            rows, logits=logits, vocab=vocab, draft_len=draft_len, step=step, distributions=drawn.distributions
        )


class RemoteModelDrafter(DeviceModelDrafter):
    """A draft model on another device than the target's, with its own copy of the rows.

    Draft tokens go to the target's device before they are verified; committed tokens come back.
    """

    draws_one_by_one = False

    def __init__(self, backend: DeviceBackend, rows: DeviceRows, captures: bool) -> None:
        """rows: the round's, on the target's device; captures: whether drafting is captured."""
        target_device, draft_device = rows.device, backend.device
        super().__init__(backend, rows.on(draft_device))
        self.captured = ()
        self.other_rows = self._rows
        self._target_rows = rows
        drawn, (max_rows, length) = self._drawn, self._drawn.distributions.shape
        distributions = target_device.zeros(drawn.distributions.shape, DISTRIBUTION)
        logits = target_device.zeros(drawn.logits.shape, np.float32)
        self._sent_probs = replace(drawn, distributions=distributions, logits=logits)
        self._packed = draft_device.zeros((max_rows * length,), np.int64)
        self._received = target_device.zeros((max_rows * length,), np.int64)
        self._records = draft_device.zeros((max_rows * record_len(length),), np.int64)
        self._captures = Captures(captures, [backend])

    @override
    def probs(self, draft_len: int) -> DraftProbs:
        """The copies on the target's device."""
        return self._sent_probs

    @override
    def queue_ahead(self, batch: int, draft_len: int, sends_logits: bool) -> bool:
        target_device, draft_device = self._target_rows.device, self._rows.device
        if not draft_len:
            target_device.wait_for(draft_device)  # It may be copying the records of the round before.
            return True
        steady = self._captures.queue(draft_device, (batch, draft_len), lambda: self._draft_and_pack(batch, draft_len))
        target_device.wait_for(draft_device)
        target_device.copy(*(array.part(0, (batch, draft_len)) for array in (self._received, self._packed)))
        if sends_logits:
            target_device.copy(self._sent_probs.distributions, self._drawn.distributions)
            target_device.copy(self._sent_probs.logits, self._drawn.logits)
        return steady

    @override
    def queue(self, batch: int, draft_len: int, steps: range, masks: DeviceArray | None) -> None:
        calls.move_drafts(self._target_rows, batch=batch, draft_len=draft_len, packed=self._received, unpacking=True)

    @override
    def queue_behind(self, batch: int, draft_len: int, records: DeviceArray) -> None:
        draft_device = self._rows.device
        draft_device.wait_for(self._target_rows.device)
        decided = self._records.part(0, (batch, record_len(draft_len)))
        draft_device.copy(decided, records)
        calls.commit_records(self._rows, batch=batch, draft_len=draft_len, records=decided)

    @override
    def close(self) -> None:
        """Captures are freed before the engine in them."""
        self._captures.clear()
        super().close()

    def _draft_and_pack(self, batch: int, draft_len: int) -> None:
        self._draft(batch, draft_len, range(draft_len))
        calls.move_drafts(self._rows, batch=batch, draft_len=draft_len, packed=self._packed, unpacking=False)


def device_model_drafter(backend: DeviceBackend, captures: bool, rows: DeviceRows) -> DeviceModelDrafter:
    """The drafter for an engine on the device of the round's ``rows``, or on another one."""
    if backend.device is rows.device:
        return DeviceModelDrafter(backend, rows)
    return RemoteModelDrafter(backend, rows, captures)
