"""The scheduler: gives requests rows of the caches, has their prompts prefilled, and runs rounds until they end.

Rows are dense, so engines never work on idle rows. Rows 0 to ``ready`` decode, and the prompts of the rows behind them
are prefilled. When a prompt is done, its row is exchanged with the first row that is being prefilled. A request that
waits for a slow mask goes back there meanwhile. When a request ends, the last row takes its place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from contextlib import suppress
from typing import NamedTuple

from specrun.errors import RequestError, as_spec_error
from specrun.request.request import FinishReason, Request, TokenOutput
from specrun.scheduler.step_turns import Turns
from specrun.scheduler.waiting_queue import RequestQueue
from specrun.speculative.draft_length import DraftLength
from specrun.speculative.loop import run_round
from specrun.speculative.round import AnyRound

_PATIENCE = 0.02
"""Seconds that a step waits where no request can be in a round. Another one may come meanwhile."""


class Event(NamedTuple):
    """New tokens of one request. There may be none when it ends."""

    request: Request
    token_outputs: Sequence[TokenOutput]
    finish_reason: FinishReason | None
    """Why the request ended with these tokens. None: another event of this request follows."""


class Scheduler:
    """Owns which request has which row.

    Any thread may use it at any time. It has no thread of its own. A thread that wants tokens runs a step for the
    requests of all threads, or waits while another thread does. So requests of several threads share batches. Only the
    thread whose turn it is may touch the rows. Any thread may touch the queue, so ``add`` and ``Request.cancel`` never
    wait for a step.
    """

    def __init__(
        self,
        rounds: AnyRound,
        lengths: DraftLength,
        max_rows: int,
        check: Callable[[Request], None] = lambda _request: None,
    ) -> None:
        """check: raises RequestError for a request that cannot be served."""
        self.round = rounds
        self.lengths = lengths
        self.max_rows = max_rows
        self.always_chunk = False
        """True if prompts are prefilled in chunks even while no request waits: one may come, or be cancelled."""
        self._check = check
        self._turns = Turns()
        self._queue = RequestQueue()
        self._adding = threading.RLock()
        """Held while requests join the queue, so that none joins after ``close``."""
        self._closed = self._shut_down = False
        self._in_step = False
        """True while a step is running, and after it was interrupted. Then rows must not move before the next step."""
        self._failed: Sequence[Request] = ()
        """The requests that an error in the last turn has failed."""
        self._joining: list[Request] = []
        """Requests that are getting rows."""
        self._rows: list[Request] = []
        self._ready = 0

    def __len__(self) -> int:
        """How many requests wait or have rows. One that has ended counts until the next step frees its row."""
        return len(self._queue) + len(self._joining) + len(self._rows)

    @property
    def num_running(self) -> int:
        """Requests that have rows. One that has ended counts until the next step frees its row."""
        return len(self._rows)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a row."""
        return len(self._queue)

    @property
    def num_cached(self) -> int:
        """Number of tokens of the requests that have rows. Prompts count whole, even while they are prefilled."""
        return sum(len(request.prompt) + len(request.token_outputs) for request in list(self._rows))

    def add(self, *requests: Request) -> None:
        """Let ``requests`` wait for rows: all of them, or none. They take turns with those of other calls.

        Raises RequestError where one has begun before, cannot be served or is given twice, and where the decoder is
        closed.
        """
        self._turns.require_own_process()
        with self._adding:
            self._require_open()
            if len(set(requests)) < len(requests):
                raise RequestError("a request is given twice; make another one")
            for request in requests:
                request.require_new()
                if request.finish_reason is None:
                    self._check(request)
            for index, request in enumerate(requests):
                request.begin(self._queue.end)
                if request.finish_reason is None:
                    self._queue.add(request, index)

    def step(self) -> None:
        """Free the rows of ended requests, admit waiting ones, prefill prompts, run one round, commit its tokens.

        Where the round is queued already, no row may change before it, so the step only ends it and commits its tokens.
        If another thread is in a step, this waits for the end of that step instead. An error in a step fails every
        request that it worked on, because their cache contents are unknown, and is raised again.
        """
        self._turns.require_own_process()
        self._require_open()
        self._advance(self._turns.ended)

    def close(self) -> None:
        """Free the engines and their memory. Requests that have not ended fail.

        A step of another thread ends first. In a forked process nothing is closed, because the engines belong to the
        parent.
        """
        if self._turns.in_child:
            return
        with self._adding:
            self._closed = True
        while not self._shut_down:
            self._advance(self._turns.ended)

    def run(self, requests: Sequence[Request]) -> Iterator[Event]:
        """Decode ``requests`` beside those of other threads. Yields their tokens as they are committed.

        Closing the generator cancels the requests that have not ended. Raises RequestError as ``add``. An error in a
        step of this thread is raised only if it fails one of ``requests``; other threads see it in their requests.
        """
        self.add(*requests)
        shown = dict.fromkeys(requests, 0)
        try:
            while shown:
                seen = self._turns.ended
                for request, count in list(self._begun(shown)):
                    reason = request.finish_reason  # Read before the tokens, as another thread may be committing.
                    new = request.token_outputs[count:]
                    shown[request] += len(new)
                    if reason:
                        del shown[request]
                    if new or reason:
                        yield Event(request, new, reason)
                if shown:
                    self._advance(seen, shown)
        finally:
            self._cancel(shown, requests)

    def _require_open(self) -> None:
        if self._closed:
            raise RequestError("the decoder is closed; open it again")

    def _begun(self, requests: dict[Request, int]) -> Iterator[tuple[Request, int]]:
        """The requests before the first one that still waits for a row. There may be thousands behind it."""
        for request, count in requests.items():
            if request in self._queue:
                return
            yield request, count

    def _advance(self, seen: int, raise_for: Container[Request] | None = None) -> None:
        """Take a turn, or wait for the end of another thread's turn. Return at once if more than ``seen`` have ended.

        raise_for: see ``_guard``.
        """
        self._turns.take(lambda: self._take_turn(raise_for), seen)

    def _take_turn(self, raise_for: Container[Request] | None) -> None:
        """Run a step, or end everything where a thread has closed the decoder."""
        if self._closed:
            self._end_all()
            return
        self._guard(self._step, raise_for)

    def _guard(self, work: Callable[[], None], raise_for: Container[Request] | None) -> None:
        """Run ``work``. Raise its error where it fails a request in ``raise_for`` or no known one; None: always."""
        self._failed = ()
        try:
            work()
        except Exception:
            if raise_for is None or not self._failed or any(request in raise_for for request in self._failed):
                raise

    def _step(self) -> None:
        """Run the parts of a step in order. An exception leaves ``_in_step`` set."""
        self._in_step = True
        self._release()
        self._admit()
        self._prefill()
        self._set_aside()
        if self._ready:
            self._decode(self._rows[: self._ready])
        self._in_step = False

    def _cancel(self, requests: Iterable[Request], raise_for: Container[Request]) -> None:
        """Cancel ``requests``, and free their rows unless a step was interrupted. raise_for: see ``_guard``."""
        for request in requests:
            request.cancel()
        # Garbage collection may close a generator in any thread, even inside a step. Then the next step frees rows.
        with suppress(RequestError):
            self._turns.take(lambda: None if self._in_step else self._guard(self._release_now, raise_for), None)

    def _release_now(self) -> None:
        """Free the rows of ended requests, and end a round first that works on them."""
        self._release()
        if self.round.next_is_queued and any(request.finish_reason for request in self._rows):
            self._decode(self._rows[: self._ready])
            self._release()

    def _end_all(self) -> None:
        """Fail all requests that have not ended, and close the engines."""
        if self._shut_down:
            return
        while request := self._queue.first():
            self._rows.append(request)
            self._queue.take(request)
        for request in self._rows:
            request.fail(RequestError("the decoder was closed before this request had ended"))
        self._rows, self._ready = [], 0
        self._shut_down = True
        self.round.close()

    def _release(self) -> None:
        """End requests that were cancelled or timed out. Those in the queue leave it, and rows of ended ones are freed.

        A round that is queued already works on these rows, so they are freed after it.
        """
        self._queue.expire()
        for row in reversed(range(len(self._rows))):
            if self._rows[row].expire() and not self.round.next_is_queued:
                self._free(row)

    def _free(self, row: int) -> None:
        """Free a row. The last decoding row moves there, and the last row of all takes the place of that one."""
        try:
            with _Failing(self, (self._rows[row],)):
                self.round.release(self._rows[row], row)
        finally:  # After an error its text is not cached, but the row is free.
            if row < self._ready:
                self._ready -= 1
                self._swap(row, self._ready)
                row = self._ready
            self._swap(row, len(self._rows) - 1)
            self._rows.pop()

    def _swap(self, row: int, other: int) -> None:
        if row != other:
            with _Failing(self, (self._rows[row], self._rows[other])):
                self.round.swap(row, other)
                self._rows[row], self._rows[other] = self._rows[other], self._rows[row]

    def _admit(self) -> None:
        """Give free rows to waiting requests, until one must wait (``_must_wait``)."""
        if not self._queue or len(self._rows) == self.max_rows or self.round.next_is_queued:
            return
        self._joining = joining = list[Request]()
        try:
            with _Failing(self, joining):
                while len(self._rows) + len(joining) < self.max_rows and (request := self._queue.first()):
                    joining.append(request)
                    if request.is_active and self._must_wait(joining):
                        joining.pop()
                        break
                    if not self._queue.take(request) or request.expire():
                        joining.pop()
                    else:
                        request.leave_queue()
                if joining:
                    self.round.admit(joining, len(self._rows))
            self._rows += joining
        finally:
            self._joining = []

    def _must_wait(self, joining: list[Request]) -> bool:
        """Whether the last of ``joining`` must wait for a prefix that is being prefilled, or for memory.

        It fails where it would be alone and memory is short.
        """
        *others, request = joining
        if self.round.should_wait_for_prefix(request, [*self._rows[self._ready :], *others]):
            return True
        if shortage := self.round.memory_shortage([*self._rows, *joining], len(self._rows)):
            if self._rows or others:  # Memory becomes free when these have ended.
                return True
            request.fail(shortage)
        return False

    def _prefill(self) -> None:
        """Prefill more of the prompts. Requests whose prompts are done join those that decode."""
        if not (joining := self._rows[self._ready :]):
            return
        drafting = self.lengths.drafting and any(request.options.fixed_draft_len != 0 for request in self._rows)
        with _Failing(self, joining):
            done = self.round.prefill(joining, self._ready, drafting, self.always_chunk or self._ready > 0)
            for row, (request, is_done) in enumerate(zip(joining, done, strict=True), self._ready):
                if is_done and not (request.finish_reason or self.round.waits_for(request)):  # Scoring may fail.
                    self.round.cache_prefix(request, row)
                    self._swap(row, self._ready)
                    self._ready += 1
        if any(request.finish_reason for request in joining):
            self._release()

    def _waits_for_draft(self, row: int) -> bool:
        """Whether the draft is to read a long part of a text that has begun, before it drafts for it."""
        request = self._rows[row]
        if not (self.lengths.drafting and request.token_outputs and self.round.draft_lacks_prompt(request, row)):
            return False
        return request.num_draft_tokens(self.round.max_draft_len) > 0

    def _set_aside(self) -> None:
        """Requests that wait for a mask, or for a draft that reads, leave the round to others until the next step."""
        if self.round.next_is_queued:
            return
        for row in reversed(range(self._ready)):
            if self.round.waits_for(self._rows[row]) or self._waits_for_draft(row):
                self._ready -= 1
                self._swap(row, self._ready)
        if not self._ready and self._rows:
            awaited = [future for future in map(self.round.waits_for, self._rows) if future]
            if len(awaited) == len(self._rows):
                wait(awaited, _PATIENCE, return_when=FIRST_COMPLETED)

    def _decode(self, requests: list[Request]) -> None:
        """Run a round of ``requests``, which are in rows 0, 1, .., and commit its tokens.

        The next one may be queued with it where no request is about to join them. It then works on the same rows.
        """
        with _Failing(self, requests):
            run_round(self.round, self.lengths, requests, self._rows_will_stay)

    def _rows_will_stay(self, draft_len: int) -> bool:
        """Whether the round behind one of ``draft_len`` is likely to have the same rows."""
        if self._ready < len(self._rows):
            return False
        may_end = any(request.remaining <= draft_len + 1 for request in self._rows)
        return not self._queue or (len(self._rows) == self.max_rows and not may_end)


class _Failing:
    """A context in which an error fails ``requests``. (``contextmanager`` would take longer in every round.)"""

    def __init__(self, scheduler: Scheduler, requests: Sequence[Request]) -> None:
        self.scheduler = scheduler
        self.requests = requests

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.scheduler._failed = self.requests
            for request in self.requests:
                request.fail(as_spec_error(error))
