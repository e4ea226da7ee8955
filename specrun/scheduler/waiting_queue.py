"""Requests that wait for a row."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from typing import TypeVar

from specrun.request.request import Request

Number = TypeVar("Number", int, float)
_STEP = 8
"""Requests that come alone and are taken between two of a call, if so many come."""


class RequestQueue:
    """Requests that wait for a row, in fair order: calls that add several take turns with the others.

    The k-th request of a call gets a turn that is k steps behind the request that was taken last. So one that comes
    alone does not wait for all of another call (start-time fair queueing, Goyal et al., 1996). A step passes whenever
    as many requests are taken as it has, so a call does not wait for ever for those that come alone. Requests of one
    turn, and of one call, are taken in the order in which they came.

    Any thread may add, take and cancel. A request is taken in one operation of a dictionary, and its taker decides
    what becomes of it. No lock is needed for that, because garbage collection may close a stream, and so cancel
    its request, in the middle of any method here.
    """

    def __init__(self) -> None:
        self._requests: dict[Request, int] = {}
        """Waiting requests, with their turns."""
        self._turn = 0
        """Never less than that of the request that was taken last."""
        self._order: list[tuple[int, int, Request]] = []
        """A heap by turns; requests that wait no more stay until they come first."""
        self._deadlines: list[tuple[float, int, Request]] = []
        """A heap; the next request to expire comes first."""
        self._lock = threading.RLock()
        """Lock of the heaps."""
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: Request) -> bool:
        return request in self._requests

    def add(self, request: Request, order: int = 0) -> None:
        """Let ``request`` wait, unless it was cancelled. order: its number among those of its call, from 0."""
        number = next(self._numbers)
        with self._lock:
            turn = self._turn + order * _STEP
            self._requests[request] = turn  # Before its deadline: those of requests that do not wait are dropped.
            heapq.heappush(self._order, (turn, number, request))
            if request.options.timeout is not None:
                heapq.heappush(self._deadlines, (request.deadline, number, request))
        if not request.is_active:
            self.end(request)

    def first(self) -> Request | None:
        """The request whose turn it is; it goes on waiting."""
        with self._lock:
            self._order = self._pruned(self._order)
            while self._order and self._order[0][2] not in self:
                heapq.heappop(self._order)
            return self._order[0][2] if self._order else None

    def take(self, request: Request) -> bool:
        """Take ``request`` out, to give it a row; False where another thread has taken it."""
        turn = self._requests.pop(request, None)
        if turn is None:
            return False
        self._turn = max(self._turn + 1, turn)
        return True

    def end(self, request: Request) -> None:
        """End ``request``, which was cancelled or whose time is over, unless it waits no more."""
        if self._requests.pop(request, None) is not None:
            request.expire()

    def expire(self) -> None:
        """End the requests whose time is over. The others cost no time."""
        with self._lock:
            deadlines, now = self._deadlines, time.perf_counter()
            while deadlines and deadlines[0][0] <= now:
                self.end(heapq.heappop(deadlines)[2])
            self._deadlines = self._pruned(deadlines)

    def _pruned(self, heap: list[tuple[Number, int, Request]]) -> list[tuple[Number, int, Request]]:
        """``heap`` without the requests that wait no more, where those are most of them."""
        if len(heap) <= 2 * len(self) + 16:
            return heap
        left = [entry for entry in heap if entry[2] in self]
        heapq.heapify(left)
        return left
