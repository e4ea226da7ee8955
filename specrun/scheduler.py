"""The scheduler: gives requests rows of the caches, has their prompts read, and runs rounds until they have ended.

Rows are dense: 0 .. ready decode, those behind them read their prompts. A request that has read its prompt changes
places with the first of those, the last one with a request that has ended: so engines never work on idle rows.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

from specrun.draft_length import DraftLength
from specrun.errors import RequestError, SpecError, as_spec_error
from specrun.queue import RequestQueue
from specrun.request import FinishReason, Request, TokenOutput
from specrun.rounds import Round
from specrun.turns import Turns


class Event(NamedTuple):
    """Tokens that a round committed to one request, or none where it has ended without."""

    request: Request
    token_outputs: Sequence[TokenOutput]
    finish_reason: FinishReason | None
    """Why these were its last tokens; None where more will come, even if another thread has committed them already."""


class Scheduler:
    """Owns which request has which row.

    Any thread may use it at any time. There is no thread of its own: a thread that wants tokens runs a step for all
    requests, whoever brought them, or waits while another thread does. So requests of several threads share batches.
    Rows belong to the thread whose turn it is; the queue belongs to nobody, and neither ``add`` nor
    ``Request.cancel`` waits for a step.

    ``check`` raises RequestError for a request that cannot be served.
    """

    def __init__(
        self,
        rounds: Round,
        lengths: DraftLength,
        max_rows: int,
        check: Callable[[Request], None] = lambda _request: None,
    ) -> None:
        self.round = rounds
        self.lengths = lengths
        self.max_rows = max_rows
        self._check = check
        self._turns = Turns()
        self._queue = RequestQueue()
        self._adding = threading.RLock()
        """Held while requests join the queue: none does so once the decoder is closed."""
        self._closed = self._shut_down = False
        self._broken_off = False
        """Whether a step is under way, or was broken off: rows must not move before the next one."""
        self._failed: Sequence[Request] = ()
        """The requests that an error in the last step has ended."""
        self._joining: list[Request] = []
        """Requests that are about to get rows."""
        self._rows: list[Request] = []
        self._ready = 0

    def __len__(self) -> int:
        """Requests that have not ended, or not been seen to have."""
        return len(self._queue) + len(self._joining) + len(self._rows)

    def add(self, request: Request) -> None:
        """Let the steps to come decode ``request``, in its turn.

        Raises RequestError for one that has begun or cannot be served, and when the decoder is closed.
        """
        self._add([request])

    def step(self) -> None:
        """Free rows of what has ended, admit what waits, read prompts, run one round, commit its tokens.

        While another thread is in a step, this waits for its end instead. An error in a step fails the requests that
        were worked on, because their cache contents are unknown, and is raised again.
        """
        self._turns.require_own_process()
        self._require_open()
        self._advance(self._turns.ended)

    def close(self) -> None:
        """Give the engines and their memory back; requests that have not ended fail.

        A step of another thread ends first. In a process that was forked from the decoder's, nothing is closed: the
        engines are the parent's.
        """
        if self._turns.in_child:
            return
        with self._adding:
            self._closed = True
        while not self._shut_down:
            self._advance(self._turns.ended)

    def run(self, requests: Sequence[Request]) -> Iterator[Event]:
        """Decode ``requests``, beside whatever else there is; yields what is committed to them, as it comes.

        Whoever stops listening cancels those that have not ended. Raises RequestError, and begins none, where one of
        them has begun, cannot be served, or stands twice among them. An error in a step of this thread is raised where
        it fails one of ``requests``; the others learn of it from their own requests.
        """
        self._add(requests)
        shown = dict.fromkeys(requests, 0)
        try:
            while shown:
                seen = self._turns.ended
                for request, count in list(self._begun(shown)):
                    reason = request.finish_reason  # Before its tokens: another thread may be committing some.
                    new = request.token_outputs[count:]
                    shown[request] += len(new)
                    if reason:
                        del shown[request]
                    if new or reason:
                        yield Event(request, new, reason)
                if shown:
                    self._advance(seen, shown)
        finally:
            for request in shown:
                request.cancel()
            # Garbage collection may close a generator in any thread, even inside a step; then the next one does this.
            with suppress(RequestError):
                self._turns.take(lambda: self._tidy(requests), None)

    def _add(self, requests: Sequence[Request]) -> None:
        self._turns.require_own_process()
        with self._adding:
            self._require_open()
            if len(set(requests)) < len(requests):
                raise RequestError("a request stands twice among those to be decoded; make another one")
            for request in requests:
                request.require_new()
                if request.finish_reason is None:
                    self._check(request)
            for request in requests:
                request.begin(self._queue.end)
                if request.finish_reason is None:
                    self._queue.add(request)

    def _require_open(self) -> None:
        if self._closed:
            raise RequestError("the decoder is closed; open it again")

    def _begun(self, requests: dict[Request, int]) -> Iterator[tuple[Request, int]]:
        """The first ones, up to one that still waits for a row, as then do all behind it: there may be thousands."""
        for request, count in requests.items():
            if request in self._queue:
                return
            yield request, count

    def _advance(self, seen: int, own: Container[Request] | None = None) -> None:
        """Take a turn, or wait for the end of another's, when ``seen`` turns had ended.

        own: raise only errors that fail one of these requests; None: raise all.
        """
        self._turns.take(lambda: self._work(own), seen)

    def _work(self, own: Container[Request] | None) -> None:
        """A turn: a step, or the end of all work where some thread has closed the decoder."""
        if self._closed:
            self._end_all()
            return
        self._guard(self._step, own)

    def _guard(self, work: Callable[[], None], own: Container[Request] | None) -> None:
        """Raise an error of ``work`` where it fails one of ``own``, or nobody knows whom; None: raise all errors."""
        self._failed = ()
        try:
            work()
        except Exception:
            if own is None or not self._failed or any(request in own for request in self._failed):
                raise

    def _step(self) -> None:
        self._broken_off = True
        self._release()
        self._admit()
        self._read()
        if self._ready:
            self._decode(self._rows[: self._ready])
        self._broken_off = False

    def _tidy(self, own: Container[Request]) -> None:
        """Free rows of what was cancelled when its listener left. An error is raised where it concerns ``own``."""
        if not self._broken_off:
            self._guard(self._release, own)

    def _end_all(self) -> None:
        """Fail what has not ended, and close the engines."""
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
        """Let go of what has ended, was cancelled or is overdue, whether it has a row or waits for one."""
        self._queue.expire()
        for row in reversed(range(len(self._rows))):
            if self._rows[row].expire():
                self._free(row)

    def _free(self, row: int) -> None:
        """Free a row. The last decoding row moves there, and the last row of all to where that one was."""
        try:
            with _Failing(self, (self._rows[row],)):
                self.round.release(self._rows[row], row)
        finally:  # An error costs what would have been cached, and the row is free all the same.
            if row < self._ready:
                self._ready -= 1
                self._swap(row, self._ready)
                row = self._ready
            self._swap(row, len(self._rows) - 1)
            self._rows.pop()

    def _swap(self, one: int, other: int) -> None:
        if one != other:
            with _Failing(self, (self._rows[one], self._rows[other])):
                self.round.swap(one, other)
                self._rows[one], self._rows[other] = self._rows[other], self._rows[one]

    def _admit(self) -> None:
        """Waiting requests take the free rows, unless they begin like one whose prompt is read now."""
        if not self._queue or len(self._rows) == self.max_rows:
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
                if joining:
                    self.round.admit(joining, len(self._rows))
            self._rows += joining
        finally:
            self._joining = []

    def _must_wait(self, joining: list[Request]) -> bool:
        """Whether the last of ``joining`` gets no row yet. It fails where there will never be room for it."""
        *others, request = joining
        if self.round.should_wait_for_prefix(request, [*self._rows[self._ready :], *others]):
            return True
        if shortage := self.round.memory_shortage([*self._rows, *joining], len(self._rows)):
            if self._rows or others:  # There will be room when others have ended.
                return True
            request.fail(shortage)
        return False

    def _read(self) -> None:
        joining = self._rows[self._ready :]
        if not joining:
            return
        drafting = self.lengths.drafting and any(request.draft_len != 0 for request in self._rows)
        with _Failing(self, joining):
            done = self.round.prefill(joining, self._ready, drafting, self._ready > 0)
            for row, (request, read) in enumerate(zip(joining, done, strict=True), self._ready):
                if read:
                    self.round.cache_prefix(request, row)
                    self._swap(row, self._ready)
                    self._ready += 1

    def _decode(self, requests: list[Request]) -> None:
        draft_lag = self.round.draft_lag(requests)
        counts = [request.num_draft_tokens(self.round.max_draft_len) for request in requests]
        draft_len = 0
        if any(counts):
            # Requests with a draft length of their own get it, whatever is best for the others.
            own = [count for request, count in zip(requests, counts, strict=True) if request.draft_len is not None]
            draft_len = max(self.lengths.choose(requests, counts, draft_lag), *own, 0)
        before = time.perf_counter()
        with _Failing(self, requests):
            outcomes = self.round.step(requests, draft_len)
            seconds = time.perf_counter() - before if self.round.is_steady_state else None
            evaluated = [(0, 0) if isinstance(outcome, SpecError) else outcome.evaluated for outcome in outcomes]
            # A drafter may have had fewer to propose.
            draft_len = max((o.drafted for o in outcomes if not isinstance(o, SpecError)), default=draft_len)
            self.lengths.observe(draft_len, seconds, requests, evaluated, draft_lag)
            for request, outcome in zip(requests, outcomes, strict=True):
                if isinstance(outcome, SpecError):
                    request.fail(outcome)
                    continue
                try:
                    request.commit(outcome)
                except Exception as error:  # What is wrong with one request, its tokenizer say, ends no other.
                    request.fail(as_spec_error(error))


class _Failing:
    """An error inside fails ``requests``. (A generator would do, but wakes more of Python every round.)"""

    def __init__(self, scheduler: Scheduler, requests: Sequence[Request]) -> None:
        self.scheduler = scheduler
        self.requests = requests

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            self.scheduler._failed = self.requests
            for request in self.requests:
                request.fail(as_spec_error(error))
