"""Requests in the event loop: submitted to the engine thread, whose updates come back in order."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Callable, Sequence

from specrun.errors import RequestError
from specrun.request.request import Request
from specrun.request.updates import Update
from specrun.serve import limits
from specrun.serve.engine import EngineThread, Submission
from specrun.serve.metrics import Metrics


class UnreadError(RequestError):
    """The client read its answer too slowly, so the requests were ended."""


class Generation:
    """The updates of one body's requests.

    with Generation(engine, metrics, requests) as generation:
        async for number, update in generation:

    ``number`` is the request's. Leaving the block cancels the requests that have not ended. Where unread updates are
    limited, a slow reader with more than ``limits.MAX_UNREAD_ENTRIES`` cancels them too.
    """

    def __init__(
        self,
        engine: EngineThread,
        metrics: Metrics,
        requests: Sequence[Request],
        spend_tokens: Callable[[int], None] = lambda _count: None,
        n: int = 1,
        is_bounded: bool = False,
    ) -> None:
        """spend_tokens: counts tokens of prompts, each of which has ``n`` requests, and of answers as they come.

        is_bounded: whether the number of unread updates is limited, because a client reads them as events.
        """
        self._spend_tokens, self._n = spend_tokens, n
        self._max_unread = math.inf
        if is_bounded:
            self._max_unread = max(limits.MAX_UNREAD_ENTRIES, limits.UNREAD_ENTRIES_PER_ANSWER * len(requests))
        self._room = self._max_unread
        """Number of entries that may still wait for the reader; negative once the answer is ended for it."""
        self._engine, self._metrics, self._requests = engine, metrics, requests
        self._updates: asyncio.Queue[tuple[int, Update]] = asyncio.Queue()
        self._entries = [1 + (request.options.logprobs or 0) for request in requests]
        """Number of entries (the token and its log-probabilities) of one token of each request."""
        self._running = len(requests)
        self._submission: Submission | None = None
        self._began = time.perf_counter()
        self._last = [0.0] * len(requests)
        """Time of each request's last token, by ``time.perf_counter``."""

    def __enter__(self) -> Generation:
        """Raises QueueFullError, EngineStoppedError and RequestError."""
        self._began = time.perf_counter()
        self._submission = self._engine.submit(self._requests, self._receive)
        self._spend_tokens(sum(len(request.prompt) for request in self._requests) // self._n)
        return self

    def __exit__(self, *_: object) -> None:
        # It refers to this object. Without the cycle, both are freed without garbage collection.
        submission, self._submission = self._submission, None
        if submission and self._running:
            submission.cancel()

    async def __aiter__(self) -> AsyncIterator[tuple[int, Update]]:
        """Updates until all requests have ended. Raises UnreadError."""
        num_open = len(self._requests)
        while num_open:
            number, update = await self._updates.get()
            if self._room < 0:
                raise UnreadError(
                    f"more than {self._max_unread} tokens and log-probabilities were not read; the answer ends"
                )
            self._room += len(update.token_outputs) * self._entries[number]
            num_open -= update.ended is not None
            yield number, update

    def _receive(self, number: int, update: Update) -> None:
        """Count an update, in the event loop. Work counts even if the client has left."""
        now = time.perf_counter()
        if count := len(update.token_outputs):
            self._spend_tokens(count)
            before = self._last[number]
            self._metrics.count_round(update, now - (before or self._began), is_first=not before)
            self._last[number] = now
        if update.ended:
            self._running -= 1
            request = self._requests[number]
            self._metrics.count_end(update.ended, len(request.prompt), now - self._began)
        if self._room < 0:
            return
        if count or update.ended:
            self._updates.put_nowait((number, update))
        self._room -= count * self._entries[number]
        if self._room < 0:
            self._end_unread()

    def _end_unread(self) -> None:
        """End all requests, and drop all unread updates but one, which wakes the reader."""
        while self._updates.qsize() > 1:
            self._updates.get_nowait()
        if self._submission:
            self._submission.cancel()
