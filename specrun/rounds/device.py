"""The round on the device: ids, lengths, logits and acceptance stay there; the host reads one small record a round.

Every round of a batch size and draft length queues the same work with the same addresses and shapes, whatever the
rows hold and want, so it is recorded once and queued as one piece from then on. Lengths, ids and wishes are contents of
device memory. With the draft on another device, its part is one recording and the target's is another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

import numpy as np

from specrun.backends import DeviceBackend
from specrun.devices import Device
from specrun.errors import BackendError, SpecError
from specrun.kernels import calls
from specrun.kernels.layout import DISTRIBUTION, MAX_VOCAB, record_len
from specrun.request import Outcome, Request
from specrun.rounds.cached import CachedTexts, Rows
from specrun.rounds.device_records import DeviceRecords
from specrun.runners.capture import Recordings
from specrun.runners.device import DeviceRunner
from specrun.runners.device_batch import DeviceRows


class DeviceRound(CachedTexts[DeviceRunner]):
    """See ``Round``. ``max_rows`` rows at most; ``graphs`` records rounds where engines and device can.

    It keeps no past texts before ``allocate_pools``, since the room for them is what rounds and prompts leave.
    """

    piece = 512  # GPUs take hardly longer for hundreds of tokens than for one.

    def __init__(
        self,
        target: DeviceBackend,
        draft: DeviceBackend | None,
        draft_len: int,
        use_logits: bool,
        max_rows: int,
        graphs: bool = True,
    ) -> None:
        if draft is None or not draft_len:
            draft, draft_len = None, 0
        self._check_vocab(target, draft)
        super().__init__(
            DeviceRunner(target, max_rows, draft_len + 1, 1),
            DeviceRunner(draft, max_rows, 1, draft_len) if draft else None,
        )
        self._max_rows = max_rows
        self.draft_len = draft_len
        self.use_logits = use_logits
        self.device = target.device
        width = target.config.build_config.max_seq_len + draft_len + 1
        self.rows = self._draft_rows = DeviceRows(self.device, max_rows, width, self.target.vocab, draft_len + 1)
        self._apart = self.draft is not None and self.draft.device is not self.device
        positions = (max_rows, draft_len + 1)
        self._chosen = self.device.zeros(positions, np.int32)
        self._target_distributions = self.device.zeros(positions, DISTRIBUTION)
        self._adjusted = self.device.zeros(self.target.logits.shape, np.float32)
        self._records = DeviceRecords(self.device, max_rows, draft_len)
        # The draft's distributions and logits, and where acceptance finds them. Without a draft it does not look.
        self._drafted = self._sent = (self._target_distributions, self.target.logits)
        if self.draft:
            distributions = self.draft.device.zeros((max_rows, draft_len), DISTRIBUTION)
            self._drafted = self._sent = (distributions, self.draft.logits)
            if self._apart:
                there = self.draft.device
                self._draft_rows = DeviceRows(there, max_rows, width, self.target.vocab, 1)
                distributions, logits = (self.device.zeros(array.shape, array.dtype) for array in self._drafted)
                self._sent = (distributions, logits)
                # Draft tokens, where they are drawn and where they are verified; and records where drafts are drawn.
                self._packed = [device.zeros((max_rows * draft_len,), np.int64) for device in (there, self.device)]
                self._records_there = there.zeros((max_rows * record_len(draft_len),), np.int64)
        self._recordings = Recordings(graphs, [runner.backend for runner in self.runners])
        self.settled = False

    def allocate_pools(self, blocks: int) -> None:
        """Have each model keep ``blocks`` blocks of past texts; once, before any request."""
        for runner in self.runners:
            runner.allocate_pool(blocks)

    def warm_up(self, show: Callable[[int, int], None] = lambda _done, _of: None) -> None:
        """Have prompts read and every round run and recorded that there can be, before any request.

        So that nothing is prepared, compiled or allocated later. ``show`` is told how many steps of how many are done.
        """
        sizes = sorted({self._batch_size(count) for count in range(1, self._max_rows + 1)}, reverse=True)
        kinds = [(size, draft_len) for size in sizes for draft_len in range(self.draft_len, -1, -1)]
        steps: list[Callable[[], object]] = [partial(runner.warm_up, self._max_rows) for runner in self.runners]
        steps += [partial(self._queue, *kind, True) for kind in kinds for _ in range(2)]
        show(0, len(steps))
        for done, step in enumerate(steps, 1):
            step()
            self._wait(self._devices())
            show(done, len(steps))
        for runner in self.runners:
            runner.backend.save_kernels()

    def memory_shortage(self, requests: Sequence[Request], used: int) -> None:
        """See ``Round``. Everything was allocated when the engines were opened."""

    def admit(self, requests: Sequence[Request], first: int) -> None:
        """See ``Round``."""
        for rows in self._every_rows():
            rows.begin(first, requests, self.draft_len, self.use_logits)
        super().admit(requests, first)

    def read(self, requests: Sequence[Request], first: int, draft: bool, awaited: bool) -> list[bool]:
        """See ``Round``."""
        done = super().read(requests, first, draft, awaited)
        for row, request in enumerate(requests, first):
            for rows in self._every_rows() if done[row - first] else ():
                rows.wake(row, request)
        self._wait(self._devices())  # A round's time is its own.
        return done

    def step(self, requests: Sequence[Request], draft_len: int) -> list[Outcome | SpecError]:
        """See ``Round``."""
        if draft_len and self.draft:
            texts = [request.tokens[:-2] for request in requests]
            longest = max(map(len, texts))
            for row, text in enumerate(texts):
                self.draft.rows.rewind(row, len(text))
            while any(self.draft.rows.lacks(texts, 0)):
                self.draft.read(texts, 0, longest)
        sends_logits = any(request.wants_logits(self.use_logits) for request in requests)
        self.settled = self._queue(self._batch_size(len(requests)), draft_len, sends_logits)
        self._wait([self.device])
        outcomes = [self._records.outcome(row, request, draft_len) for row, request in enumerate(requests)]
        for row, (request, outcome) in enumerate(zip(requests, outcomes, strict=True)):
            accepted = 0 if isinstance(outcome, SpecError) else len(outcome.accepted)
            self._advance(row, len(request.tokens), accepted, draft_len)
        return outcomes

    def close(self) -> None:
        """See ``Round``. Work ends before what it uses: recordings, then engines, then memory and streams."""
        devices = self._devices()
        for device in devices:
            with suppress(BackendError):  # After a failed round there is nothing left to wait for.
                device.wait()
        self._recordings.clear()
        for runner in self.runners:
            runner.backend.close()
        for device in devices:
            device.close()

    def _advance(self, row: int, length: int, accepted: int, draft_len: int) -> None:
        """Write down what a round left in the caches of a text of ``length`` tokens: the last draft was never fed."""
        self.target.rows.lengths[row] = length + accepted
        if self.draft and draft_len:
            self.draft.rows.lengths[row] = length + max(0, accepted - 1)

    def _batch_size(self, count: int) -> int:
        """The size of the round for ``count`` requests: 1, 2, 4, .., which bounds how many kinds there are to prepare.

        What the rows behind them hold rests, or belongs to nobody.
        """
        return min(1 << (count - 1).bit_length(), self._max_rows)

    def _queue(self, batch: int, g: int, sends_logits: bool) -> bool:
        """Queue a round; returns whether it takes the time that all of its kind will take.

        sends_logits: whether a row is accepted by the draft's logits, so that they must go to the target's device.
        """
        if not self.draft or not self._apart:
            return self._recordings.queue(self.device, (batch, g), lambda: self._queue_here(batch, g))
        there, settled = self.draft.device, True
        if g:
            settled = self._recordings.queue(there, ("draft", batch, g), lambda: self._queue_draft(batch, g))
            self.device.follow(there)
            packed, received = (array.part(0, (batch, g)) for array in self._packed)
            self.device.copy(received, packed)
            for to, source in zip(self._sent, self._drafted, strict=True) if sends_logits else ():
                self.device.copy(to, source)
        settled &= self._recordings.queue(self.device, ("target", batch, g), lambda: self._queue_target(batch, g))
        there.follow(self.device)
        records, told = self._records.of(batch, g)[0], self._records_there.part(0, (batch, record_len(g)))
        there.copy(told, records)
        calls.commit_records(self._draft_rows, batch=batch, draft_len=g, records=told)
        return settled

    def _queue_here(self, batch: int, g: int) -> None:
        """Queue a round on one device."""
        if g:
            self._queue_draft(batch, g)
        self._queue_target(batch, g)

    def _queue_draft(self, batch: int, g: int) -> None:
        """Draft g tokens."""
        draft, rows = self.draft, self._draft_rows
        if draft is None:
            raise RuntimeError("there is no draft")
        vocab = min(draft.vocab, self.target.vocab)  # Ids beyond the target's are never proposed.
        distributions, _ = self._drafted
        for step in range(g):
            # After full acceptance the cache lacks two tokens, else one. Two are fed always: writing one again
            # changes nothing, and the shapes stay the same.
            offset, count = (-2, 2) if step == 0 else (step - 1, 1)
            logits = draft.forward(batch, rows, offset, count, step - 1, 1, step)
            calls.apply_penalties(rows, logits=logits, vocab=vocab, first=step, draft_len=g, adjusted=logits)
            calls.sample_draft(rows, logits=logits, vocab=vocab, draft_len=g, step=step, distributions=distributions)
        if self._apart:
            calls.move_drafts(rows, batch=batch, draft_len=g, packed=self._packed[0], unpacking=False)

    def _queue_target(self, batch: int, g: int) -> None:
        """Verify, accept, commit, and write it down."""
        target, rows = self.target, self.rows
        if self._apart and g:
            calls.move_drafts(rows, batch=batch, draft_len=g, packed=self._packed[1], unpacking=True)
        raw = target.forward(batch, rows, -1, g + 1, -1, g + 1)
        adjusted = self._adjusted.part(0, raw.shape)
        calls.apply_penalties(rows, logits=raw, vocab=target.vocab, first=0, draft_len=g, adjusted=adjusted)
        p, chosen = self._target_distributions, self._chosen
        calls.sample_target(rows, logits=raw, adjusted=adjusted, distributions=p, chosen=chosen)
        drafting, (q, draft_logits) = self.draft or target, self._sent
        records, logprobs = self._records.of(batch, g)
        calls.accept(
            rows,
            q=q,
            draft_logits=draft_logits,
            step_stride=drafting.step_stride,
            draft_stride=drafting.vocab,
            draft_vocab=min(drafting.vocab, target.vocab),
            p=p,
            chosen=chosen,
            target_logits=raw,
            adjusted=adjusted,
            records=records,
        )
        calls.log_probabilities(rows, logits=raw, records=records, found=logprobs)
        self._records.fetch(batch, g)

    def _wait(self, devices: Sequence[Device]) -> None:
        for device in devices:
            device.wait()

    def _devices(self) -> list[Device]:
        return list({id(runner.device): runner.device for runner in self.runners}.values())

    def _row_holders(self) -> Sequence[Rows]:
        return [*super()._row_holders(), *self._every_rows()]

    def _every_rows(self) -> list[DeviceRows]:
        return [self.rows, self._draft_rows] if self._apart else [self.rows]

    @staticmethod
    def _check_vocab(*backends: DeviceBackend | None) -> None:
        for backend in backends:
            if backend and backend.config.graph.vocab_size > MAX_VOCAB:
                raise BackendError(
                    f"a vocabulary of {backend.config.graph.vocab_size}; the kernels serve at most {MAX_VOCAB}"
                )
