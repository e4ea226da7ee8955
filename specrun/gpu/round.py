"""The round on a device. Token ids, lengths and logits stay there; the host reads one small record of each row.

All rounds of one batch size and draft length queue the same work, with the same addresses and shapes. Lengths, ids and
sampling parameters are contents of device memory. So a round is captured once and then replayed. A drafter on another
device captures its own work.

With overlap scheduling, the next round is queued before the last one is read, so the device does not wait for the host.
The conditions are:

- The scheduler allows it, because no request is about to join: the requests keep their rows.
- No row is constrained and no draft comes from the host: masks and those drafts depend on the text.
- Both rounds before had the same draft length, so the draft lacks no tokens.
- No request has ended, so no row must be freed; and at least one cannot reach its length in the round before.

Kernels check lengths and stop ids, and update token counts and failed drafts. A row that has ended drafts and commits
nothing more. Only the host checks stop texts, cancelling, timeouts and errors. A request that ends by these still
decodes in the queued round, whose tokens are dropped. Its cache then holds more tokens than its text, and only the
text's length counts. Rows do not move before the queued round is read. After an error in a step the queued round is not
read: its requests have failed, and the stream runs later work behind it.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from specrun.devices import Device, DeviceArray
from specrun.drafters.draft_plan import DraftPlan
from specrun.engine_dir.pass_times import PairTimes, PassTimes
from specrun.errors import BackendError, RequestError, SpecError
from specrun.gpu.backend import DeviceBackend
from specrun.gpu.captures import Captures
from specrun.gpu.drafters import DeviceDrafter, DraftProbs
from specrun.gpu.kernels import calls
from specrun.gpu.kernels.layout import DISTRIBUTION
from specrun.gpu.logits import DeviceLogits
from specrun.gpu.records import DeviceRecords, QueuedRound
from specrun.gpu.rows import DeviceRows
from specrun.gpu.runner import DeviceRunner
from specrun.request.request import Outcome, Request, num_accepted
from specrun.sampling.sampler import SamplingParams
from specrun.speculative.round import Round, RoundResult, Rows, TargetLogits
from specrun.text.masks import fill_masks

_TIMED_ROUNDS = 3
"""Number of timed rounds of each shape in the warm-up."""
_MAX_TIMED_LENGTH = 2048
"""Maximum length of texts in timed rounds, in tokens."""

MakeDrafter = Callable[[DeviceRows], DeviceDrafter]
"""Factory: the rows of a round to its drafter."""


class DeviceRound(Round[DeviceRunner, DeviceDrafter]):
    """A round in kernels. ``allocate_pools`` adds the prefix caches later, in the memory that is then free."""

    prefill_chunk_size = 512  # A GPU takes hardly longer for hundreds of tokens than for one.

    def __init__(
        self,
        target: DeviceBackend,
        make_drafter: MakeDrafter | None,
        max_draft_len: int,
        use_logits: bool,
        max_rows: int,
        captures: bool = True,
    ) -> None:
        """captures: whether rounds are captured where the engines can be. Raises BackendError."""
        if make_drafter is None:
            max_draft_len = 0
        runner = DeviceRunner(target, max_rows, max_draft_len + 1, max_draft_len + 1, 1)
        self.device = target.device
        token_stride = target.config.build_config.max_seq_len + max_draft_len + 1
        sizes = (max_rows, token_stride, runner.vocab, max_draft_len + 1)
        self.rows = DeviceRows(self.device, *sizes, max_draft_len, use_logits)
        drafter = make_drafter(self.rows) if make_drafter and max_draft_len else None
        super().__init__(runner, drafter, max_draft_len, use_logits)
        other_rows = drafter.other_rows if drafter else None
        self._all_rows = [self.rows, other_rows] if other_rows else [self.rows]
        positions = (max_rows, max_draft_len + 1)
        self._chosen = self.device.zeros(positions, np.int32)
        self._target_distributions = self.device.zeros(positions, DISTRIBUTION)
        self._adjusted = self.device.zeros(runner.logits.shape, np.float32)
        self._records = DeviceRecords(self.device, max_rows, max_draft_len)
        self._queued = deque(QueuedRound(self._records) for _ in range(2))
        """The last two rounds, the later one last."""
        self._next: QueuedRound | None = None
        """The round that is queued before the last one is read."""
        self._masks = self.device.zeros((*positions, -(-runner.vocab // 32)), np.uint32)
        self._draft_masks = self.device.zeros((max_rows, 1, self._masks.shape[2]), np.uint32)
        self._drafts = self.device.zeros((max_rows * max(1, max_draft_len),), np.int64)
        self._pinned_drafts = self.device.pinned_like(self._drafts)
        # Without a drafter, the kernel ``accept`` does not read it.
        self._no_probs = DraftProbs(self._target_distributions, runner.logits, 0, 0, runner.vocab)
        self._devices = list(dict.fromkeys((*target.devices, *(self.drafter.devices if self.drafter else ()))))
        self._seconds: dict[tuple[int, int], float] = {}
        """Seconds of rounds in the warm-up, by batch size and draft length."""
        self._captures = Captures(captures, [target, *(self.drafter.captured if self.drafter else ())])

    @property
    @override
    def next_is_queued(self) -> bool:  # type: ignore[override]
        return self._next is not None

    def allocate_pools(self, blocks: int) -> None:
        """Give each model a prefix cache of ``blocks`` blocks, once, before any request. Raises BackendError."""
        self.target.allocate_pool(blocks)
        if self.drafter:
            self.drafter.allocate_pool(blocks)

    def warm_up(self, show: Callable[[int, int], None] = lambda _done, _of: None, times_rounds: bool = True) -> None:
        """Run prompts and capture every possible round, so that nothing is prepared, compiled or allocated later.

        Call it before any request. It calls ``show`` with the numbers of finished steps and of all steps. times_rounds:
        whether to measure ``pass_times``. Raises BackendError.
        """
        max_rows = self.rows.max_rows
        sizes = sorted({self.rows.batch_size(count) for count in range(1, max_rows + 1)}, reverse=True)
        kinds = [(size, draft_len) for size in sizes for draft_len in range(self.max_draft_len, -1, -1)]
        steps: list[Callable[[], object]] = [partial(self.target.warm_up, max_rows)]
        steps += [self.drafter.warm_up] if self.drafter else []
        steps += [partial(self._queue, *kind, True) for kind in kinds for _ in range(2)]
        steps += [partial(self._time, *kind) for kind in kinds] if times_rounds else []
        show(0, len(steps))
        for done, step in enumerate(steps, 1):
            step()
            self._wait(self._devices)
            show(done, len(steps))
        self.target.backend.save_kernels()
        if self.drafter:
            self.drafter.save_kernels()

    @override
    def pass_times(self) -> PairTimes | None:
        """Whole rounds of the warm-up count as passes of the target; their drafts are in them."""
        if not self._seconds or (self.drafter and self.drafter.needs_host):
            return None
        rows, draft_lens = range(1, self.rows.max_rows + 1), range(self.max_draft_len + 1)
        seconds = tuple(tuple(self._seconds[self.rows.batch_size(count), g] for g in draft_lens) for count in rows)
        tokens = tuple(draft_len + 1 for draft_len in draft_lens)
        return PairTimes(PassTimes(rows=tuple(rows), tokens=tokens, seconds=seconds), None)

    @override
    def admit(self, requests: Sequence[Request], first: int) -> None:
        for rows in self._all_rows:
            rows.begin(first, requests)
        super().admit(requests, first)

    @override
    def prefill(self, requests: Sequence[Request], first: int, draft: bool, chunked: bool) -> list[bool]:
        done = super().prefill(requests, first, draft, chunked)
        for row, request in enumerate(requests, first):
            if done[row - first]:
                for rows in self._all_rows:
                    rows.activate_row(row, request)
        self._wait(self._devices)  # So that prefilling is not part of the next round's time.
        return done

    @override
    def step(self, requests: Sequence[Request], plan: DraftPlan, may_queue_next: bool = False) -> RoundResult:
        current, self._next = self._next or self._start(requests, plan), None
        following = None
        if may_queue_next and self._can_follow(requests, plan.draft_len):
            following = self._start(requests, plan, is_prepared=True)
        current.wait()
        outcomes = [self._outcome(current, row, request) for row, request in enumerate(requests)]
        for row, (request, outcome) in enumerate(zip(requests, outcomes, strict=True)):
            self.target.end_round(row, request, outcome, num_accepted(outcome))
        if self.drafter:
            self.drafter.observe(requests, outcomes, current.draft_len)
        self._next = following
        # A row takes the time of all draft tokens though it uses fewer.
        return RoundResult(outcomes, current.seconds if current.is_steady_state else None, current.draft_len)

    @override
    def release(self, request: Request, row: int) -> None:
        super().release(request, row)
        for rows in self._all_rows:
            rows.deactivate_row(row)

    @override
    def problem(self) -> str | None:
        return next(filter(None, (device.problem() for device in self._devices)), None)

    @override
    def target_logits(self) -> TargetLogits:
        return DeviceLogits(self.target)

    @override
    def close(self) -> None:
        """Captures are freed before the engines in them, and engines before memory and streams."""
        with ExitStack() as closing:  # Everything is closed, even if closing one thing raises.
            for device in self._devices:
                closing.callback(device.close)
            if self.drafter:
                closing.callback(self.drafter.close)
            closing.callback(self.target.backend.close)
            closing.callback(self._captures.clear)
            for device in self._devices:
                with suppress(BackendError):  # After a failed round there is no work to wait for.
                    device.wait()

    def _can_follow(self, requests: Sequence[Request], draft_len: int) -> bool:
        """Whether a round of ``draft_len`` may be queued before the one before it is read."""
        drafts_on_host = draft_len and self.drafter and self.drafter.needs_host
        return (
            not drafts_on_host
            and all(before.draft_len == draft_len for before in self._queued)
            and all(request.matcher is None and request.finish_reason is None for request in requests)
            and any(request.remaining > draft_len + 1 for request in requests)
        )

    def _start(self, requests: Sequence[Request], plan: DraftPlan, is_prepared: bool = False) -> QueuedRound:
        """Queue a round. is_prepared: the drafter is prepared for it by the round before."""
        self._queued.rotate(-1)
        queued = self._queued[-1]
        queued.begin()
        draft_len = plan.draft_len
        counts = [request.most_draft_tokens(draft_len) for request in requests]  # A draft may fail from here on.
        if not is_prepared:
            draft_len = self.drafter.prepare(requests, plan) if self.drafter else 0
        sends_logits = any(request.accepts_by_logits(self.use_logits) for request in requests)
        batch = self.rows.batch_size(len(requests))
        if any(request.matcher for request in requests):
            steady = self._queue_with_masks(requests, counts, batch, draft_len, sends_logits)
        else:
            steady = self._queue(batch, draft_len, sends_logits)
        queued.end(batch, draft_len, steady)
        return queued

    def _queue(self, batch: int, draft_len: int, sends_logits: bool) -> bool:
        """Queue a round. Returns False while this shape is warming up; its time is then ignored.

        sends_logits: whether any row uses logits acceptance, which needs the draft's logits.
        """
        drafter, steady = self.drafter, True
        if drafter:
            steady = drafter.queue_ahead(batch, draft_len, sends_logits)
        steady &= self._captures.queue(
            self.device, (batch, draft_len), lambda: self._draft_and_verify(batch, draft_len)
        )
        if drafter:
            drafter.queue_behind(batch, draft_len, self._records.of(batch, draft_len)[0])
        return steady

    def _time(self, batch: int, draft_len: int) -> None:
        """Time sampling rounds of a shape that is warm. Texts have half the length that fits."""
        max_len = self.target.backend.config.build_config.max_seq_len
        length = min(max(1, max_len // 2), _MAX_TIMED_LENGTH)
        texts = [Request([0] * length, SamplingParams(temperature=1.0, seed=0), max_len - length) for _ in range(batch)]
        for rows in self._all_rows:
            rows.begin(0, texts)
            for row, text in enumerate(texts):
                rows.activate_row(row, text)
        began, ended, times = self.device.event(), self.device.event(), []
        for _ in range(_TIMED_ROUNDS):
            began.record()
            self._queue(batch, draft_len, True)
            ended.record()
            ended.wait()
            times.append(ended.seconds_since(began))
        self._seconds[batch, draft_len] = min(times)
        for rows in self._all_rows:
            for row in range(batch):
                rows.deactivate_row(row)

    def _queue_with_masks(
        self, requests: Sequence[Request], counts: Sequence[int], batch: int, draft_len: int, sends_logits: bool
    ) -> bool:
        """``_queue`` in pieces, where a request is constrained.

        After each piece the host reads the draft tokens. A drafter with ``draws_one_by_one`` has a piece for each
        draft token, whose logits are masked. Others have one piece; draft tokens that a grammar forbids are rejected.
        """
        drafter, steady = self.drafter, True
        matchers = [request.matcher for request in requests]
        drafts: list[list[int]] = [[] for _ in requests]
        columns = [fill_masks(matchers, drafts, self.target.vocab)]
        if drafter and draft_len:
            steady = drafter.queue_ahead(batch, draft_len, sends_logits)
            size = 1 if drafter.draws_one_by_one else draft_len
            for first in range(0, draft_len, size):
                steps = range(first, first + size)
                masks = columns[-1] if drafter.draws_one_by_one else None
                steady &= self._queue_draft(batch, draft_len, steps, masks)
                drafted = self._pinned_drafts[: batch * draft_len].reshape(batch, draft_len)[:, : steps.stop].tolist()
                for row, count in enumerate(counts):  # Numbers behind a row's draft tokens mean nothing.
                    drafts[row] = list(itertools.takewhile(lambda token: token >= 0, drafted[row][:count]))
                for step in steps:
                    columns.append(fill_masks(matchers, [row[: step + 1] for row in drafts], self.target.vocab))
        all_masks = np.stack(columns, axis=1)
        self.device.write(self._masks.part(0, all_masks.shape), all_masks)
        work = partial(self._verify, batch, draft_len, masked=True)
        steady &= self._captures.queue(self.device, ("verify", batch, draft_len), work)
        if drafter:
            drafter.queue_behind(batch, draft_len, self._records.of(batch, draft_len)[0])
        return steady

    def _outcome(self, queued: QueuedRound, row: int, request: Request) -> Outcome | SpecError:
        outcome = queued.outcome(row, request)
        if request.matcher and isinstance(outcome, BackendError):
            try:  # Masked logits are not finite where the constraint allows no token; this raises the reason.
                request.apply_penalties(np.zeros(self.target.vocab, np.float32), ())
            except RequestError as error:
                return error
        return outcome

    def _queue_draft(self, batch: int, draft_len: int, steps: range, masks: npt.NDArray[np.uint32] | None) -> bool:
        """Draft tokens ``steps`` of each row, and wait for them. masks: uint32 [rows, words], of one step."""
        on_device = None
        if masks is not None:
            self.device.write(self._draft_masks.part(0, (len(masks), 1, masks.shape[1])), masks)
            on_device = self._draft_masks.part(0, (batch, *self._draft_masks.shape[1:]))
        work = partial(self._draft, batch, draft_len, steps, on_device)
        steady = self._captures.queue(self.device, ("draft", batch, draft_len, steps), work)
        self._wait([self.device])
        return steady

    def _draft(self, batch: int, draft_len: int, steps: range, masks: DeviceArray | None) -> None:
        """Queue the drafting on this device, and a copy of the draft tokens to the host."""
        if self.drafter:
            self.drafter.queue(batch, draft_len, steps, masks)
        drafts = self._drafts.part(0, (batch * draft_len,))
        calls.move_drafts(self.rows, batch=batch, draft_len=draft_len, packed=drafts, unpacking=False)
        self.device.copy_to_host(drafts, self._pinned_drafts[: batch * draft_len])

    def _draft_and_verify(self, batch: int, draft_len: int) -> None:
        if self.drafter and draft_len:
            self.drafter.queue(batch, draft_len, range(draft_len), None)
        self._verify(batch, draft_len)

    def _verify(self, batch: int, draft_len: int, masked: bool = False) -> None:
        """Queue the verify pass, acceptance and the commit. masked: some rows have masks."""
        target, rows = self.target, self.rows
        draft = self.drafter.probs(draft_len) if self.drafter else self._no_probs
        p, chosen = self._target_distributions, self._chosen
        records, logprobs = self._records.of(batch, draft_len)
        logits = target.forward(batch, rows, -1, draft_len + 1, -1, draft_len + 1)
        adjusted = self._adjusted.part(0, logits.shape)
        calls.apply_penalties(rows, logits=logits, vocab=target.vocab, first=0, draft_len=draft_len, adjusted=adjusted)
        if masked:
            masks = self._masks.part(0, (batch, draft_len + 1, self._masks.shape[2]))
            calls.apply_masks(rows, masks=masks, vocab=target.vocab, adjusted=adjusted)
        calls.sample_target(rows, logits=logits, adjusted=adjusted, distributions=p, chosen=chosen)
        calls.accept(
            rows,
            q=draft.distributions,
            draft_logits=draft.logits,
            step_stride=draft.step_stride,
            draft_stride=draft.row_stride,
            draft_vocab=draft.vocab,
            p=p,
            chosen=chosen,
            target_logits=logits,
            adjusted=adjusted,
            records=records,
        )
        calls.log_probabilities(rows, logits=logits, records=records, logprobs=logprobs)

    @override
    def _row_holders(self) -> Sequence[Rows]:
        return [*super()._row_holders(), *self._all_rows]

    def _wait(self, devices: Sequence[Device]) -> None:
        for device in devices:
            device.wait()
