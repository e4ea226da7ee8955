"""The scheduler: gives requests rows of the caches, has their prompts read, and runs rounds until they have ended.

Rows are dense: 0 .. ready decode, those behind them read their prompts. A request that has read its prompt changes
places with the first of those, the last one with a request that has ended: so engines never work on idle rows.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specrun.draft_length import DraftLength
from specrun.errors import BackendError, SpecError
from specrun.request import Piece, Request
from specrun.rounds import Round
from specrun.sampling import NOT_NUMBERS


@dataclass(frozen=True)
class Event:
    """Tokens that a round committed to one request, or none where it has ended without."""

    request: Request
    pieces: Sequence[Piece]


class Scheduler:
    """Owns which request has which row. Call it from one thread at a time; ``Request.cancel`` may come from any."""

    def __init__(self, rounds: Round, lengths: DraftLength, max_rows: int) -> None:
        self.round = rounds
        self.lengths = lengths
        self.max_rows = max_rows
        self._waiting: deque[Request] = deque()
        self._timed: list[Request] = []
        """Those with a timeout."""
        self._stepping = False
        """Whether a step is under way, or was broken off: rows must not move now."""
        self._rows: list[Request] = []
        self._ready = 0

    def __len__(self) -> int:
        """Requests that have not ended, or not been seen to have."""
        return len(self._waiting) + len(self._rows)

    def add(self, request: Request) -> None:
        """Let ``request`` be decoded, in its turn, by the steps to come. Raises RequestError for one that has begun."""
        request.begin()
        self._waiting.append(request)
        if request.timeout is not None:
            self._timed.append(request)

    def step(self) -> None:
        """Free rows of what has ended, admit what waits, read prompts, run one round, commit its tokens.

        What breaks while requests are worked on ends them, since what their rows hold is not known any more, and is
        raised.
        """
        self._stepping = True
        self._release()
        self._admit()
        self._read()
        if self._ready:
            self._decode(self._rows[: self._ready])
        self._stepping = False

    def run(self, requests: Sequence[Request]) -> Iterator[Event]:
        """Decode ``requests``, beside whatever else there is; yields what is committed to them, as it comes.

        Whoever stops listening cancels those that have not ended.
        """
        for request in requests:
            self.add(request)
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
            if not self._stepping:  # Garbage collection may close a generator at any time.
                self._waiting = deque(request for request in self._waiting if not request.expire())
                self._release()

    def _begun(self, requests: dict[Request, int]) -> Iterator[tuple[Request, int]]:
        """The first ones, up to one that still waits for a row, as then do all behind it: there may be thousands."""
        for request, count in requests.items():
            if not (request.pieces or request.finish_reason or request in self._rows):
                return
            yield request, count

    def _release(self) -> None:
        self._timed = [request for request in self._timed if not request.expire()]
        for row in reversed(range(len(self._rows))):
            if self._rows[row].expire():
                self._free(row)

    def _free(self, row: int) -> None:
        """The last row that decodes takes its place, and the last of all the place of that."""
        self.round.forget(self._rows[row], row)
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
            if self.round.gains(self._waiting[0], self._rows[self._ready :] + joining):
                break
            request = self._waiting.popleft()
            if not request.expire():
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
            done = self.round.read(joining, self._ready, drafting, self._ready > 0)
            for row, (request, read) in enumerate(zip(joining, done, strict=True), self._ready):
                if read:
                    self.round.keep(request, row)
                    self._swap(row, self._ready)
                    self._ready += 1

    def _decode(self, requests: list[Request]) -> None:
        backlog = self.round.backlog(requests)
        counts = [request.draft_count(self.round.draft_len) for request in requests]
        draft_len = 0
        if any(counts):
            # Requests with a draft length of their own get it, whatever is best for the others.
            own = [count for request, count in zip(requests, counts, strict=True) if request.draft_len is not None]
            draft_len = max(self.lengths.choose(requests, counts, backlog), *own, 0)
        before = time.perf_counter()
        with _Failing(requests):
            outcomes = self.round.step(requests, draft_len)
            seconds = time.perf_counter() - before if self.round.settled else None
            evaluated = [outcome.evaluated if outcome else (0, 0) for outcome in outcomes]
            self.lengths.observe(draft_len, seconds, requests, evaluated, backlog)
            for request, outcome in zip(requests, outcomes, strict=True):
                if outcome:
                    request.commit(outcome)
                else:
                    request.fail(BackendError(NOT_NUMBERS))


class _Failing:
    """What is raised inside ends ``requests``. (A generator would do, but wakes more of Python every round.)"""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = requests

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None:
            reason = error if isinstance(error, SpecError) else BackendError(f"broken off: {error!r}")
            for request in self.requests:
                request.fail(reason)
