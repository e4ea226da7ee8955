"""Requests that wait for a row."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import OrderedDict

from specrun.request.request import Request


class RequestQueue:
    """Requests that wait for a row, in the order in which they came.

    Any thread may add, take and cancel. A request is taken in one operation of a dictionary, and whoever takes it
    decides what becomes of it. No lock is needed for that, because garbage collection may close a stream, and so cancel
    its request, in the middle of any method here.
    """

    def __init__(self) -> None:
        self._requests: OrderedDict[Request, bool] = OrderedDict()
        self._deadlines: list[tuple[float, int, Request]] = []
        """A heap; the next request to expire comes first."""
        self._deadlines_lock = threading.RLock()
        self._numbers = itertools.count()

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request: Request) -> bool:
        return request in self._requests

    def add(self, request: Request) -> None:
        """Let ``request`` wait behind all others, unless it was cancelled."""
        self._requests[request] = True  # Before its deadline: those of requests that do not wait are dropped.
        if request.timeout is not None:
            with self._deadlines_lock:
                heapq.heappush(self._deadlines, (request.deadline, next(self._numbers), request))
        if not request.is_active:
            self.end(request)

    def first(self) -> Request | None:
        """The request that has waited longest; it goes on waiting."""
        while True:
            try:
                return next(iter(self._requests), None)
            except RuntimeError:  # Another thread has added or taken one meanwhile.
                continue

    def take(self, request: Request) -> bool:
        """Take ``request`` out; False where somebody else has taken it."""
        return self._requests.pop(request, False)

    def end(self, request: Request) -> None:
        """End ``request``, which was cancelled or whose time is over, unless it waits no more."""
        if self.take(request):
            request.expire()

    def expire(self) -> None:
        """End the requests whose time is over. The others cost no time."""
        with self._deadlines_lock:
            deadlines, now = self._deadlines, time.perf_counter()
            while deadlines and deadlines[0][0] <= now:
                self.end(heapq.heappop(deadlines)[2])
            if len(deadlines) > 2 * len(self) + 16:  # Most of these requests wait no more.
                self._deadlines = [entry for entry in deadlines if entry[2] in self]
                heapq.heapify(self._deadlines)
