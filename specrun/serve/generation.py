"""Requests in the event loop: they are given to the engine thread, and their updates come back in order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

from specrun.request.request import Request
from specrun.request.updates import Update
from specrun.serve.engine import EngineThread, Job
from specrun.serve.metrics import Metrics


class Generation:
    """The updates of one body's requests.

    with Generation(engine, metrics, requests) as generation:
        async for number, update in generation:

    ``number`` is the request's. Leaving the block cancels the requests that have not ended.
    """

    def __init__(self, engine: EngineThread, metrics: Metrics, requests: Sequence[Request]) -> None:
        self._engine, self._metrics, self._requests = engine, metrics, requests
        self._updates: asyncio.Queue[tuple[int, Update]] = asyncio.Queue()
        self._running = len(requests)
        self._job: Job | None = None
        self._began = time.perf_counter()
        self._last = [0.0] * len(requests)
        """When each request's last token came."""

    def __enter__(self) -> Generation:
        """Raises QueueFullError, EngineStoppedError and RequestError."""
        self._began = time.perf_counter()
        self._job = self._engine.submit(self._requests, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        job, self._job = self._job, None  # It refers to this object. Without it both are freed with no collection.
        if job and self._running:
            job.cancel()

    async def __aiter__(self) -> AsyncIterator[tuple[int, Update]]:
        """Updates until all requests have ended."""
        left = len(self._requests)
        while left:
            number, update = await self._updates.get()
            left -= update.ended is not None
            yield number, update

    def _receive(self, number: int, update: Update) -> None:
        """Count an update, in the event loop. Work counts even if nobody listens any more."""
        now = time.perf_counter()
        if count := len(update.token_outputs):
            before = self._last[number]
            self._metrics.count_round(update, now - (before or self._began), is_first=not before)
            self._last[number] = now
        if update.ended:
            self._running -= 1
            request = self._requests[number]
            self._metrics.count_end(update.ended, len(request.prompt), now - self._began)
        if count or update.ended:
            self._updates.put_nowait((number, update))
