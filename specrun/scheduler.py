"""The scheduler: gives requests rows of the caches, has their prompts read, and runs rounds until they have ended.

Rows are dense: 0 .. ready decode, those behind them read their prompts. A request that has read its prompt changes
places with the first of those, the last one with a request that has ended: so engines never work on idle rows.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from specrun.draft_length import DraftLength
from specrun.errors import RequestError, SpecError, as_spec_error
from specrun.request import Piece, Request
from specrun.rounds import Round


@dataclass(frozen=True)
class Event:
    """Tokens that a round committed to one request, or none where it has ended without."""

    request: Request
    pieces: Sequence[Piece]


class Scheduler:
    """Owns which request has which row.

    One thread at a time may use it: another one gets a RequestError while the first has requests that have not ended.
    ``Request.cancel`` may come from any thread. ``check`` raises RequestError for a request that cannot be served.
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
        self._one_thread = _OneThread(self._has_work)
        self._closed = False
        self._waiting: deque[Request] = deque()
        self._deadlines: list[tuple[float, int, Request]] = []
        """A heap of the requests with a timeout, the next to expire first."""
        self._added = itertools.count()
        self._cancelled = False
        """Whether a request was cancelled that may be waiting."""
        self._stepping = False
        """Whether a step is under way, or was broken off: rows must not move now."""
        self._rows: list[Request] = []
        self._ready = 0

    def __len__(self) -> int:
        """Requests that have not ended, or not been seen to have."""
        return len(self._waiting) + len(self._rows)

    def add(self, request: Request) -> None:
        """Let ``request`` be decoded, in its turn, by the steps to come.

        Raises RequestError for one that has begun or cannot be served.
        """
        self._add([request])

    def step(self) -> None:
        """Free rows of what has ended, admit what waits, read prompts, run one round, commit its tokens.

        What breaks while requests are worked on ends them, since what their rows hold is not known any more, and is
        raised.
        """
        with self._one_thread:
            self._require_open()
            self._stepping = True
            self._release()
            self._admit()
            self._read()
            if self._ready:
                self._decode(self._rows[: self._ready])
            self._stepping = False

    def close(self) -> None:
        """Give the engines and their memory back; requests that have not ended fail. Raises RequestError as ``add``."""
        with self._one_thread:
            if self._closed:
                return
            self._closed = True
            for request in (*self._rows, *self._waiting):
                request.fail(RequestError("the decoder was closed before this request had ended"))
            self._rows, self._ready = [], 0
            self._waiting.clear()
            self._deadlines.clear()
            self.round.close()

    def run(self, requests: Sequence[Request]) -> Iterator[Event]:
        """Decode ``requests``, beside whatever else there is; yields what is committed to them, as it comes.

        Whoever stops listening cancels those that have not ended. Raises RequestError, and begins none, where one of
        them has begun, cannot be served, or stands twice among them.
        """
        self._add(requests)
        shown = dict.fromkeys(requests, 0)
        try:
            while shown:
                self.step()
                for request, count in list(self._begun(shown)):
                    new = request.pieces[count:]
                    shown[request] += len(new)
                    if request.finish_reason:
                        del shown[request]
                    if new or request.finish_reason:
                        yield Event(request, new)
        finally:
            for request in shown:
                request.cancel()
            # Garbage collection may close a generator at any time and in any thread; then the next step does this.
            with suppress(RequestError), self._one_thread:
                if not self._stepping:
                    self._release()

    def _add(self, requests: Sequence[Request]) -> None:
        with self._one_thread:
            self._require_open()
            if len(set(requests)) < len(requests):
                raise RequestError("a request stands twice among those to be decoded; make another one")
            for request in requests:
                request.require_new()
                if request.finish_reason is None:
                    self._check(request)
            for request in requests:
                request.begin(self._note_cancelled)
                self._waiting.append(request)
                if request.timeout is not None:
                    heapq.heappush(self._deadlines, (request.deadline, next(self._added), request))

    def _require_open(self) -> None:
        if self._closed:
            raise RequestError("the decoder is closed; open it again")

    def _has_work(self) -> bool:
        return any(request.is_active for request in (*self._rows, *self._waiting))

    def _note_cancelled(self) -> None:
        self._cancelled = True

    def _begun(self, requests: dict[Request, int]) -> Iterator[tuple[Request, int]]:
        """The first ones, up to one that still waits for a row, as then do all behind it: there may be thousands."""
        for request, count in requests.items():
            if not (request.pieces or request.finish_reason or request in self._rows):
                return
            yield request, count

    def _release(self) -> None:
        """Let go of what has ended, was cancelled or is overdue, whether it has a row or waits for one."""
        overdue, now = False, time.perf_counter()
        while self._deadlines and self._deadlines[0][0] <= now:
            heapq.heappop(self._deadlines)
            overdue = True
        if len(self._deadlines) > 2 * len(self) + 16:  # Most of them have ended long before.
            self._deadlines = [entry for entry in self._deadlines if entry[2].is_active]
            heapq.heapify(self._deadlines)
        if overdue or self._cancelled:
            self._cancelled = False
            self._waiting = deque(request for request in self._waiting if not request.expire())
        for row in reversed(range(len(self._rows))):
            if self._rows[row].expire():
                self._free(row)

    def _free(self, row: int) -> None:
        """The last row that decodes takes its place, and the last of all the place of that."""
        self.round.release(self._rows[row], row)
        if row < self._ready:
            self._ready -= 1
            self._swap(row, self._ready)
            row = self._ready
        self._swap(row, len(self._rows) - 1)
        self._rows.pop()

    def _swap(self, one: int, other: int) -> None:
        if one != other:
            with _Failing((self._rows[one], self._rows[other])):
                self.round.swap(one, other)
                self._rows[one], self._rows[other] = self._rows[other], self._rows[one]

    def _admit(self) -> None:
        """Waiting requests take the free rows, unless they begin like one whose prompt is read now."""
        joining: list[Request] = []
        while self._waiting and len(self._rows) + len(joining) < self.max_rows:
            if self.round.should_wait_for_prefix(self._waiting[0], self._rows[self._ready :] + joining):
                break
            request = self._waiting.popleft()
            if request.expire():
                continue
            together = [*self._rows, *joining, request]
            if shortage := self.round.memory_shortage(together, len(self._rows)):
                if len(together) > 1:  # There will be room when others have ended.
                    self._waiting.appendleft(request)
                    break
                request.fail(shortage)
                continue
            joining.append(request)
        if joining:
            with _Failing(joining):
                self.round.admit(joining, len(self._rows))
            self._rows += joining

    def _read(self) -> None:
        joining = self._rows[self._ready :]
        if not joining:
            return
        drafting = self.lengths.drafting and any(request.draft_len != 0 for request in self._rows)
        with _Failing(joining):
            done = self.round.prefill(joining, self._ready, drafting, self._ready > 0)
            for row, (request, read) in enumerate(zip(joining, done, strict=True), self._ready):
                if read:
                    self.round.cache_prefix(request, row)
                    self._swap(row, self._ready)
                    self._ready += 1

    def _decode(self, requests: list[Request]) -> None:
        backlog = self.round.draft_lag(requests)
        counts = [request.num_draft_tokens(self.round.max_draft_len) for request in requests]
        draft_len = 0
        if any(counts):
            # Requests with a draft length of their own get it, whatever is best for the others.
            own = [count for request, count in zip(requests, counts, strict=True) if request.draft_len is not None]
            draft_len = max(self.lengths.choose(requests, counts, backlog), *own, 0)
        before = time.perf_counter()
        with _Failing(requests):
            outcomes = self.round.step(requests, draft_len)
            seconds = time.perf_counter() - before if self.round.is_steady_state else None
            evaluated = [(0, 0) if isinstance(outcome, SpecError) else outcome.evaluated for outcome in outcomes]
            # A drafter may have had fewer to propose.
            draft_len = max((o.drafted for o in outcomes if not isinstance(o, SpecError)), default=draft_len)
            self.lengths.observe(draft_len, seconds, requests, evaluated, backlog)
            for request, outcome in zip(requests, outcomes, strict=True):
                if isinstance(outcome, SpecError):
                    request.fail(outcome)
                    continue
                try:
                    request.commit(outcome)
                except Exception as error:  # What is wrong with one request, its tokenizer say, ends no other.
                    request.fail(as_spec_error(error))


class _Failing:
    """What is raised inside ends ``requests``. (A generator would do, but wakes more of Python every round.)"""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = requests

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            for request in self.requests:
                request.fail(as_spec_error(error))


class _OneThread:
    """Lets one thread in, again and again; others get a RequestError while it is inside or ``has_work``."""

    def __init__(self, has_work: Callable[[], bool]) -> None:
        self._has_work = has_work
        self._lock = threading.RLock()  # Garbage collection may come here from inside.
        self._user: threading.Thread | None = None
        self._inside = 0

    def __enter__(self) -> None:
        thread = threading.current_thread()
        with self._lock:
            user = self._user
            # A thread of the process that this one was forked from is not alive here.
            if user not in (None, thread) and user.is_alive() and (self._inside or self._has_work()):
                raise RequestError(
                    f"thread {user.name!r} is decoding with this decoder, and thread {thread.name!r} must wait until "
                    "it has ended; use a decoder from one thread at a time"
                )
            if user is not thread:
                self._user, self._inside = thread, 0
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._inside -= 1
