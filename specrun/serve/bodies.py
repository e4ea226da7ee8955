"""Reads untrusted bodies of requests. The event loop, which sends all streams, only receives them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from anyio import to_thread
from starlette.requests import ClientDisconnect, Request

from specrun.kv_cache.host_memory import return_freed
from specrun.openai.body import model_name
from specrun.serve.engine import QueueFullError
from specrun.serve.errors import ApiError
from specrun.serve.json_body import parse
from specrun.serve.large_body import LargeBodies
from specrun.serve.limits import (
    LARGE_BODY_BYTES,
    MAX_BODY_BYTES,
    MAX_BODY_SECONDS,
    MAX_LARGE_BODIES,
    MAX_RECEIVED_BYTES,
)

T = TypeVar("T")
M = TypeVar("M")

_PAUSE = 2.0
"""Seconds of pause for each second of work on a large body. Streams have the interpreter's lock meanwhile."""


class BodyReader:
    """Reads bodies in worker threads: large ones one after the other, in a third of the time at most."""

    def __init__(self) -> None:
        self._check = LargeBodies()
        self._turn = asyncio.Semaphore()
        """Lock: one large body at a time is checked or read."""
        self._num_large = 0
        """Number of large bodies that have not been read."""
        self._num_received = 0
        """Bytes of bodies that have not arrived completely."""

    async def read(
        self,
        request: Request,
        acquire: Callable[[str | None], Awaitable[M]],
        handle: Callable[[M, Any], T],
        max_prompt_lens: Mapping[str | None, int | None],
    ) -> T:
        """Call ``handle`` in a worker thread, with the JSON of a body and the model that it names.

        acquire: gets a model by its name, and may wait for it. max_prompt_lens: tokens of the longest prompt that each
        model takes. Raises ApiError for a body that is too large, too slow, or no JSON, and QueueFullError where too
        many large ones wait.
        """
        data = await self._receive(request)
        if len(data) <= LARGE_BODY_BYTES:
            value = await to_thread.run_sync(parse, data)
            model = await acquire(model_name(value))
            return await to_thread.run_sync(handle, model, value)
        if self._num_large > MAX_LARGE_BODIES:
            raise QueueFullError(f"{MAX_LARGE_BODIES} large bodies wait, and no more may")
        self._num_large += 1
        try:
            async with self._turn:
                name = await self._check.check(request.url.path, data, max_prompt_lens)
            model = await acquire(name)
            async with self._turn_and_pause():
                return await to_thread.run_sync(_read_large, data, model, handle)
        finally:
            self._num_large -= 1

    async def _receive(self, request: Request) -> bytes:
        try:
            async with asyncio.timeout(MAX_BODY_SECONDS):
                return await self._read(request)
        except TimeoutError:
            raise ApiError(408, f"the body took longer than {MAX_BODY_SECONDS:.0f} s") from None
        except ClientDisconnect:
            raise ApiError(400, "the client left before its body had ended") from None

    async def _read(self, request: Request) -> bytes:
        size, parts = 0, []
        try:
            async for part in request.stream():
                size += len(part)
                self._num_received += len(part)
                if size > MAX_BODY_BYTES:
                    raise ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
                if self._num_received > MAX_RECEIVED_BYTES:
                    raise QueueFullError(f"bodies of {MAX_RECEIVED_BYTES} bytes are coming, and no more may")
                parts.append(part)
            return b"".join(parts)
        finally:
            self._num_received -= size

    @asynccontextmanager
    async def _turn_and_pause(self) -> AsyncIterator[None]:
        """The lock for a large body, released after a pause."""
        await self._turn.acquire()
        began = time.perf_counter()
        try:
            yield
        finally:
            pause = _PAUSE * (time.perf_counter() - began)
            asyncio.get_running_loop().call_later(pause, self._turn.release)

    async def close(self) -> None:
        """End the process that checks large bodies."""
        await self._check.close()


def _read_large(data: bytes, model: M, handle: Callable[[M, Any], T]) -> T:
    try:
        return handle(model, parse(data))
    finally:
        return_freed()
