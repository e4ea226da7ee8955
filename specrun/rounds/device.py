"""The round on the device: ids, lengths, logits and acceptance stay there; the host reads one small record a round.

Every round of a batch size and draft length queues the same work with the same addresses and shapes, whatever the
rows' lengths, so it is recorded once and queued as one piece from then on. Lengths and ids are contents of device
memory.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from specrun.backends import DeviceBackend
from specrun.devices import Device
from specrun.errors import BackendError, SpecError
from specrun.kernels import MAX_VOCAB
from specrun.request import MAX_LOGPROBS, Outcome, Request
from specrun.rounds.cached import CachedTexts, Rows
from specrun.rounds.device_rows import TOKEN_VALUE, DeviceRows
from specrun.rounds.device_runner import DeviceRunner
from specrun.sampling import NOT_NUMBERS, TokenLogprob

# As in kernels/round.cu.
DISTRIBUTION = np.dtype(
    [("peak", "<f4"), ("best", "<i4"), ("temperature", "<f4"), ("smallest", "<f4"), ("total", "<f4")]
)


@dataclass(frozen=True)
class _Batch:
    """What a round's work depends on beside its draft length: rounds that agree in it may be one recording."""

    size: int
    use_logits: bool = False
    """Whether a row is accepted by the draft's logits."""
    adjusts: bool = False
    """Whether a row's logits are adjusted."""
    logprobs: bool = False
    """Whether a row wants log-probabilities."""


class DeviceRound(CachedTexts[DeviceRunner]):
    """See ``Round``. ``max_rows`` rows at most; ``graphs`` records rounds where engines and device can.

    ``blocks``: of past texts, that each model keeps.
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
        blocks: int = 0,
    ) -> None:
        if draft is None or not draft_len:
            draft, draft_len = None, 0
        self._check_vocab(target, draft)
        super().__init__(
            DeviceRunner(target, max_rows, draft_len + 1, 1, blocks),
            DeviceRunner(draft, max_rows, 1, draft_len, blocks) if draft else None,
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
        # The draft's distributions and logits, and where acceptance finds them. Without a draft it does not look.
        self._drafted = self._sent = (self._target_distributions, self.target.logits)
        if self.draft:
            distributions = self.draft.device.zeros((max_rows, draft_len), DISTRIBUTION)
            self._drafted = self._sent = (distributions, self.draft.logits)
            if self._apart:
                self._draft_rows = DeviceRows(self.draft.device, max_rows, width, self.target.vocab, 1)
                distributions, logits = (self.device.zeros(array.shape, array.dtype) for array in self._drafted)
                self._sent = (distributions, logits)
        # Of no rows until one wants its logits adjusted.
        self._adjusted = self.device.zeros((0,), np.float32)
        self._records = self.device.zeros((max_rows, 3 + draft_len), np.int64)
        self._mirror = self.device.mirror(self._records)
        self._logprobs = self.device.zeros((*positions, 1 + MAX_LOGPROBS), TOKEN_VALUE)
        self._logprobs_mirror = self.device.mirror(self._logprobs)
        self.settled = False
        self._record = graphs and not self._apart
        self._seen: set[tuple[_Batch, int]] = set()
        self._recorded: dict[tuple[_Batch, int], Callable[[], None]] = {}
        self._batch = _Batch(0)

    def memory_shortage(self, requests: Sequence[Request], used: int) -> None:
        """See ``Round``. Everything was allocated when the engines were opened."""

    def admit(self, requests: Sequence[Request], first: int) -> None:
        """See ``Round``."""
        if any(request.adjusts for request in requests) and not self._adjusted.nbytes:
            self._adjusted = self.device.zeros(self.target.logits.shape, np.float32)
        for rows in self._every_rows():
            rows.begin(first, requests, self.draft_len, self.use_logits)
        super().admit(requests, first)

    def read(self, requests: Sequence[Request], first: int, draft: bool, awaited: bool) -> list[bool]:
        """See ``Round``."""
        done = super().read(requests, first, draft, awaited)
        for row, request in enumerate(requests, first):
            for rows in self._every_rows() if done[row - first] else ():
                rows.wake(row, request)
        self._wait()  # A round's time is its own.
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
        self._batch = _Batch(
            # Of 1, 2, 4, .. rows, which bounds how many shapes there are to prepare. What the rows behind hold rests,
            # or belongs to nobody.
            min(1 << (len(requests) - 1).bit_length(), self._max_rows),
            use_logits=any(request.wants_logits(self.use_logits) for request in requests),
            adjusts=any(request.adjusts for request in requests),
            logprobs=any(request.logprobs is not None for request in requests),
        )
        self._play(draft_len)
        self._wait()
        outcomes = [self._outcome(row, request, draft_len) for row, request in enumerate(requests)]
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
        self._recorded.clear()
        for runner in self.runners:
            runner.backend.close()
        for device in devices:
            device.close()

    def _advance(self, row: int, length: int, accepted: int, draft_len: int) -> None:
        """Write down what a round left in the caches of a text of ``length`` tokens: the last draft was never fed."""
        self.target.rows.lengths[row] = length + accepted
        if self.draft and draft_len:
            self.draft.rows.lengths[row] = length + max(0, accepted - 1)

    def _play(self, g: int) -> None:
        """Queue a round: the first of its kind piece by piece, which also warms the engines up, then as one."""
        key = (self._batch, g)
        self.settled = key in self._recorded or (key in self._seen and not self._record)
        if self._record and key in self._seen and key not in self._recorded:
            self._try_to_record(key)
        if key in self._recorded:
            self._recorded[key]()
        else:
            self._queue(g)
        self._seen.add(key)

    def _try_to_record(self, key: tuple[_Batch, int]) -> None:
        self._record = all(runner.backend.recordable for runner in self.runners)
        if self._record:
            try:
                self._recorded[key] = self.device.record(lambda: self._queue(key[1]))
            except BackendError as error:
                self._record = False
                warnings.warn(f"rounds are queued piece by piece: they cannot be recorded ({error})", stacklevel=2)

    def _send_state(self, draft: DeviceRunner) -> None:
        """To a draft on another GPU: what the target's has committed."""
        draft.device.follow(self.device)
        draft.device.copy(self._draft_rows.tokens, self.rows.tokens)
        draft.device.copy(self._draft_rows.progress, self.rows.progress)
        if self._batch.adjusts:
            draft.device.copy(self._draft_rows.counts, self.rows.counts)

    def _queue(self, g: int) -> None:
        """Draft g tokens, verify, accept and commit."""
        batch, target, rows = self._batch, self.target, self.rows
        if self.draft and g:
            self._queue_draft(self.draft, g)
        raw = logits = target.forward(batch.size, rows, -1, g + 1, -1, g + 1)
        if batch.adjusts:
            logits = self._adjusted.part(0, raw.shape)
            rows.adjust(raw, target.vocab, 0, g, logits)
        judged = (self._target_distributions, self._chosen)
        own = (rows.progress, g, rows.sampling)
        rows.launch("judge_target", batch.size, g + 1, logits, target.vocab, *own, *judged)
        drafting = self.draft or target
        draft = (*self._sent, drafting.step_stride, drafting.vocab, min(drafting.vocab, target.vocab))
        ends = (rows.stop_ids, rows.counts, int(batch.adjusts), self._records)
        rows.launch("accept", batch.size, 1, *rows.state(g), *draft, *judged, logits, target.vocab, *ends)
        self.device.fetch(self._records, self._mirror)
        if batch.logprobs:
            wanted = (g, rows.sampling, self._records, self._logprobs)
            rows.launch("log_probabilities", batch.size, g + 1, raw, target.vocab, *wanted)
            self.device.fetch(self._logprobs, self._logprobs_mirror)

    def _queue_draft(self, draft: DeviceRunner, g: int) -> None:
        batch, rows = self._batch, self._draft_rows
        vocab = min(draft.vocab, self.target.vocab)  # Ids beyond the target's are never proposed.
        distributions, _ = self._drafted
        if self._apart:
            self._send_state(draft)
        for step in range(g):
            # After full acceptance the cache lacks two tokens, else one. Two are fed always: writing one again
            # changes nothing, and the shapes stay the same.
            offset, count = (-2, 2) if step == 0 else (step - 1, 1)
            logits = draft.forward(batch.size, rows, offset, count, step - 1, 1, step)
            if batch.adjusts:
                rows.adjust(logits, vocab, step, g, logits)
            own = (*rows.state(g), step, distributions)
            rows.launch("draw_draft", batch.size, 1, logits, draft.vocab, vocab, *own)
        if self._apart:
            self.device.follow(draft.device)
            self.device.copy(self.rows.tokens, rows.tokens)
            if batch.use_logits:
                for to, source in zip(self._sent, self._drafted, strict=True):
                    self.device.copy(to, source)

    def _outcome(self, row: int, request: Request, draft_len: int) -> Outcome | SpecError:
        """What the kernels wrote down of a row; see ``commit`` in round.cu."""
        width = 3 + draft_len
        drafted, accepted, following, *drafts = self._mirror.reshape(-1)[row * width : (row + 1) * width].tolist()
        if following < 0:
            return BackendError(NOT_NUMBERS)
        logprobs = None
        if request.logprobs is not None:
            logprobs = self._logprobs_of(row * (draft_len + 1), accepted + 1, request.logprobs)
            if any(math.isnan(logprob) for logprob, _ in logprobs):
                return BackendError(NOT_NUMBERS)
        return Outcome(drafted, drafts[:accepted], following, logprobs)

    def _logprobs_of(self, first: int, count: int, top: int) -> list[TokenLogprob]:
        """What the kernels wrote down of ``count`` positions; see ``log_probabilities`` in round.cu."""
        found = self._logprobs_mirror.reshape(-1, 1 + MAX_LOGPROBS)[first : first + count]
        return [
            # A vocabulary may have fewer ids than are wanted.
            TokenLogprob(own, [(token, value) for token, value in likeliest[:top] if token >= 0 and value > -np.inf])
            for (_, own), *likeliest in found.tolist()
        ]

    def _wait(self) -> None:
        for device in self._devices():
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
