"""The round on the device: ids, lengths, logits and acceptance stay there; the host reads one small record a round.

Every round of a batch size and draft length queues the same work with the same addresses and shapes, whatever the
rows' lengths, so it is recorded once and queued as one piece from then on. Lengths and ids are contents of device
memory.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from specrun.backends import DeviceBackend, Feed
from specrun.devices import Device, DeviceArray
from specrun.errors import BackendError, RequestError
from specrun.kernels import MAX_VOCAB
from specrun.request import Request
from specrun.rounds import Outcome
from specrun.sampling import NOT_NUMBERS, Purpose

# As in kernels/round.cu.
SAMPLING = np.dtype(
    [
        ("seed", "<u8"),
        ("top_p", "<f8"),
        ("temperature", "<f4"),
        ("top_k", "<i4"),
        ("min_p", "<f4"),
        ("unused", "<i4"),
    ]
)
PROGRESS = np.dtype([("length", "<i4"), ("remaining", "<i4")])
DISTRIBUTION = np.dtype(
    [("peak", "<f4"), ("best", "<i4"), ("temperature", "<f4"), ("smallest", "<f4"), ("total", "<f4")]
)

MAX_STOP_IDS = 64


class Rows:
    """What a device knows of a batch's rows. The target's device decides; a draft elsewhere is sent copies."""

    def __init__(self, device: Device, rows: int, width: int) -> None:
        self.device = device
        self.width = width
        self.tokens = device.zeros((rows, width), np.int64)
        self.progress = device.zeros((rows,), PROGRESS)
        self.sampling = device.zeros((rows,), SAMPLING)

    def begin(self, tokens: npt.NDArray[Any], progress: npt.NDArray[Any], sampling: npt.NDArray[Any]) -> None:
        """Write down a batch's first state."""
        self.device.write(self.tokens.part(0, tokens.shape), tokens)
        self.device.write(self.progress.part(0, progress.shape), progress)
        self.device.write(self.sampling.part(0, sampling.shape), sampling)


class DeviceRunner:
    """One model on its device, and the memory it is fed from; what ``ModelRunner`` is on the host."""

    def __init__(self, backend: DeviceBackend, rows: int, positions: int, steps: int) -> None:
        """``positions``: most tokens of a row in one call of a round; ``steps``: calls whose logits are kept."""
        build = backend.config.build_config
        self.backend = backend
        self.device = backend.device
        self.vocab = backend.config.graph.vocab_size
        self.room = 0
        self.input_ids = self.device.zeros((rows, max(positions + 1, build.max_input_len)), np.int64)
        self.write_indices = self.device.zeros((rows,), np.int64)
        self.logits_indices = self.device.zeros((rows, positions), np.int64)
        # Engines want aligned addresses: a step's logits begin at a multiple of 256 bytes.
        self.step_stride = -(-rows * positions * self.vocab // 64) * 64
        self.logits = self.device.zeros((steps, self.step_stride), np.float32)

    def prefill(self, batch: int, ids: npt.NDArray[np.int64]) -> None:
        """Put ``ids`` [B, S], right-padded, at the beginning of every row's cache, as many at a time as it takes."""
        ids = np.minimum(ids, self.vocab - 1)  # A draft without the target's padding has no row for its ids.
        longest = self.backend.config.build_config.max_input_len
        for start in range(0, ids.shape[1], longest):
            piece = ids[:, start : start + longest]
            feed = self._feed(batch, piece.shape[1], 1)
            zeros = np.zeros((batch, 1), np.int64)
            for array, values in zip(feed, (piece, zeros + start, zeros), strict=True):
                self.device.write(array, values)
            self.backend.enqueue(feed, self._step_logits(batch, 0, 1), fixed=False)

    def forward(
        self,
        batch: int,
        rows: Rows,
        offset: int,
        count: int,
        keep_from: int,
        kept: int,
        step: int = 0,
        fixed: bool = True,
    ) -> DeviceArray:
        """Queue a call that feeds ``count`` tokens of every row, from its length + ``offset`` on.

        The logits of ``kept`` positions come back, the first at length + ``keep_from``. A verify pass of draft_len g
        feeds the last committed token and the drafts, and keeps all: (-1, g + 1, -1, g + 1). See the kernel ``feed``.
        """
        feed = self._feed(batch, count, kept)
        source = (rows.tokens, rows.width, rows.progress)
        self.device.launch("feed", (batch, 1), *source, offset, count, keep_from, kept, self.room, self.vocab, *feed)
        logits = self._step_logits(batch, step, kept)
        self.backend.enqueue(feed, logits, fixed=fixed)
        return logits

    def _step_logits(self, batch: int, step: int, kept: int) -> DeviceArray:
        return self.logits.part(step * self.step_stride, (batch, kept, self.vocab))

    def _feed(self, batch: int, count: int, kept: int) -> Feed:
        return Feed(
            self.input_ids.part(0, (batch, count)),
            self.write_indices.part(0, (batch,)),
            self.logits_indices.part(0, (batch, kept)),
        )


@dataclass
class _Batch:
    """What holds from one ``start`` to the next."""

    size: int
    behind: int = 0
    """Tokens of each row that the draft has not read: one for every round since the last in which it drafted."""
    seen: set[int] = field(default_factory=set)
    """Draft lengths of its rounds so far."""


class DeviceRound:
    """See ``Round``. ``max_rows`` rows at most; ``graphs`` records rounds where engines and device can."""

    def __init__(
        self,
        target: DeviceBackend,
        draft: DeviceBackend | None,
        draft_len: int,
        use_logits: bool,
        max_rows: int,
        graphs: bool = True,
    ) -> None:
        if draft is None:
            draft_len = 0
        self.draft_len = draft_len
        self.use_logits = use_logits and draft_len > 0
        self._check_vocab(target, draft)
        self.device = target.device
        width = target.config.build_config.max_seq_len + draft_len + 1
        self.target = DeviceRunner(target, max_rows, draft_len + 1, 1)
        self.draft = DeviceRunner(draft, max_rows, 1, draft_len) if draft and draft_len else None
        self.rows = Rows(self.device, max_rows, width)
        self._apart = self.draft is not None and self.draft.device is not self.device
        self._draft_rows = Rows(self.draft.device, max_rows, width) if self.draft and self._apart else self.rows
        self._stop_ids = self.device.zeros((max_rows, MAX_STOP_IDS), np.int64)
        self._stops = 0
        self._chosen = self.device.zeros((max_rows, draft_len + 1), np.int32)
        self._target_distributions = self.device.zeros((max_rows, draft_len + 1), DISTRIBUTION)
        if self.draft:
            self._draft_distributions = self.draft.device.zeros((max_rows, draft_len), DISTRIBUTION)
            if self._apart and self.use_logits:
                self._sent_distributions = self.device.zeros((max_rows, draft_len), DISTRIBUTION)
                self._sent_logits = self.device.zeros(self.draft.logits.shape, np.float32)
        self._records = self.device.zeros((max_rows, 3 + draft_len), np.int64)
        self._mirror = self.device.mirror(self._records)
        self._record = graphs and not self._apart
        self._recorded: dict[tuple[int, ...], Callable[[], None]] = {}
        self._batch = _Batch(0)

    def start(self, requests: Sequence[Request]) -> None:
        """See ``Round``. All but each prompt's last token go into the caches; that one starts the first round."""
        batch = len(requests)
        longest = max(len(request.tokens) + request.remaining for request in requests)
        tokens = np.zeros((batch, self.rows.width), np.int64)
        progress, sampling = np.zeros(batch, PROGRESS), np.zeros(batch, SAMPLING)
        self._stops = max(len(request.stop_ids) for request in requests)
        if self._stops > MAX_STOP_IDS:
            raise RequestError(f"{self._stops} stop ids: at most {MAX_STOP_IDS} are served")
        stop_ids = np.full((batch, max(1, self._stops)), -1, np.int64)
        for row, request in enumerate(requests):
            params = request.params
            tokens[row, : len(request.tokens)] = request.tokens
            progress[row] = (len(request.tokens), request.remaining)
            temperature = 0 if params.greedy else max(params.temperature, 1e-37)  # Smaller ones round to 0, greedy.
            sampling[row] = (
                params.seed,
                params.top_p,
                min(temperature, 1e38),
                min(params.top_k, MAX_VOCAB),
                params.min_p,
                0,
            )
            stop_ids[row, : len(request.stop_ids)] = sorted(request.stop_ids)
        self._batch = _Batch(batch)
        self.rows.begin(tokens, progress, sampling)
        if self._apart:
            self._draft_rows.begin(tokens, progress, sampling)
        self.device.write(self._stop_ids.part(0, stop_ids.shape), stop_ids)
        known = max(len(request.tokens) for request in requests) - 1
        for runner in self._runners():
            runner.room = runner.backend.allocate_cache(batch, longest + self.draft_len + 1)
            if known:
                runner.prefill(batch, tokens[:, :known])

    def step(self, requests: Sequence[Request], draft_len: int) -> list[Outcome | None]:
        """See ``Round``. Raises BackendError when an engine's logits are not numbers."""
        if draft_len and self.draft and self._batch.behind:
            self._catch_up(self.draft)
        self._play(draft_len)
        self._batch.behind = 0 if draft_len else self._batch.behind + 1
        self.device.wait()
        records = self._mirror.reshape(-1)[: len(requests) * (3 + draft_len)].reshape(len(requests), -1)
        return [_outcome(records[row]) if request.remaining else None for row, request in enumerate(requests)]

    def close(self) -> None:
        """See ``Round``. Work ends before what it uses: recordings, then engines, then memory and streams."""
        devices = {id(runner.device): runner.device for runner in self._runners()}.values()
        for device in devices:
            with suppress(BackendError):  # After a failed round there is nothing left to wait for.
                device.wait()
        self._recorded.clear()
        self._batch = _Batch(0)
        for runner in self._runners():
            runner.backend.close()
        for device in devices:
            device.close()

    def _play(self, g: int) -> None:
        """Queue a round: the first of its kind piece by piece, which also warms the engines up, then as one."""
        batch = self._batch
        key = (batch.size, g, self._stops, *(runner.room for runner in self._runners()))
        if self._record and key not in self._recorded and g in batch.seen:
            self._try_to_record(key, g)
        batch.seen.add(g)
        if key in self._recorded:
            self._recorded[key]()
        else:
            self._queue(batch.size, g)

    def _try_to_record(self, key: tuple[int, ...], g: int) -> None:
        self._record = all(runner.backend.recordable for runner in self._runners())
        if self._record:
            try:
                self._recorded[key] = self.device.record(lambda: self._queue(self._batch.size, g))
            except BackendError as error:
                self._record = False
                warnings.warn(f"rounds are queued piece by piece: they cannot be recorded ({error})", stacklevel=2)

    def _catch_up(self, draft: DeviceRunner) -> None:
        """Let the draft read what was committed while it rested, in pieces that it takes."""
        behind, longest = self._batch.behind, draft.backend.config.build_config.max_input_len
        if self._apart:
            self._send_state(draft)
        while behind:
            count = min(behind, longest)
            # The last two committed tokens are fed by the round itself.
            offset = -behind - 2
            draft.forward(self._batch.size, self._draft_rows, offset, count, offset, 1, fixed=False)
            behind -= count

    def _send_state(self, draft: DeviceRunner) -> None:
        """To a draft on another GPU: what the target's has committed."""
        draft.device.follow(self.device)
        draft.device.copy(self._draft_rows.tokens, self.rows.tokens)
        draft.device.copy(self._draft_rows.progress, self.rows.progress)

    def _queue(self, batch: int, g: int) -> None:
        """Draft g tokens, verify, accept and commit."""
        target, rows = self.target, self.rows
        if self.draft and g:
            self._queue_draft(self.draft, batch, g)
        logits = target.forward(batch, rows, -1, g + 1, -1, g + 1)
        state = (rows.tokens, rows.width, rows.progress, g)
        stops = (self._stop_ids, self._stops)
        if self.use_logits and self.draft and g:
            distributions = self._target_distributions
            described = (logits, target.vocab, rows.sampling, rows.progress, g, distributions)
            self.device.launch("describe_target", (batch, g + 1), *described)
            q, draft_logits = self._draft_distributions, self.draft.logits
            if self._apart:
                q, draft_logits = self._sent_distributions, self._sent_logits
            draft = (q, draft_logits, self.draft.step_stride, self.draft.vocab, min(self.draft.vocab, target.vocab))
            own = (distributions, logits, target.vocab, rows.sampling)
            self.device.launch("accept_logits", (batch, 1), *state, *draft, *own, *stops, self._records)
        else:
            chosen = (logits, target.vocab, rows.sampling, rows.progress, g, self._chosen)
            self.device.launch("choose_target", (batch, g + 1), *chosen)
            self.device.launch("accept_tokens", (batch, 1), *state, self._chosen, *stops, self._records)
        self.device.fetch(self._records, self._mirror)

    def _queue_draft(self, draft: DeviceRunner, batch: int, g: int) -> None:
        rows = self._draft_rows
        vocab = min(draft.vocab, self.target.vocab)  # Ids beyond the target's are never proposed.
        purpose = Purpose.DRAFT if self.use_logits else Purpose.TARGET
        if self._apart:
            self._send_state(draft)
        for step in range(g):
            # After full acceptance the cache lacks two tokens, else one. Two are fed always: writing one again
            # changes nothing, and the shapes stay the same.
            offset, count = (-2, 2) if step == 0 else (step - 1, 1)
            logits = draft.forward(batch, rows, offset, count, step - 1, 1, step)
            own = (logits, draft.vocab, vocab, rows.sampling, rows.progress, step, g, int(purpose))
            drawn = (rows.tokens, rows.width, self._draft_distributions)
            draft.device.launch("draw_draft", (batch, 1), *own, *drawn)
        if self._apart:
            self.device.follow(draft.device)
            self.device.copy(self.rows.tokens, rows.tokens)
            if self.use_logits:
                self.device.copy(self._sent_distributions, self._draft_distributions)
                self.device.copy(self._sent_logits, draft.logits)

    def _runners(self) -> list[DeviceRunner]:
        return [self.target, self.draft] if self.draft else [self.target]

    @staticmethod
    def _check_vocab(*backends: DeviceBackend | None) -> None:
        for backend in backends:
            if backend and backend.config.graph.vocab_size > MAX_VOCAB:
                raise BackendError(
                    f"a vocabulary of {backend.config.graph.vocab_size}; the kernels serve at most {MAX_VOCAB}"
                )


def _outcome(record: npt.NDArray[np.int64]) -> Outcome:
    """What the kernels wrote down of a row; see ``commit`` in round.cu."""
    drafted, accepted, following, *drafts = (int(value) for value in record)
    if following < 0:
        raise BackendError(NOT_NUMBERS)
    return Outcome(drafted, drafts[:accepted], following)
