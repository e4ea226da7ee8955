"""Reading a request's body without trusting it. The event loop, in which all streams are sent, only receives it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, TypeVar

from anyio import to_thread
from starlette.requests import ClientDisconnect, Request

from specrun.kv_cache.host_memory import return_freed
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

_PAUSE = 2.0
"""Seconds without a large body for each second that one took: the interpreter's lock is for the streams then."""


class BodyReader:
    """Reads bodies in worker threads: large ones one after the other, in a third of the time at most."""

    def __init__(self) -> None:
        self._check = LargeBodies()
        self._large = asyncio.Semaphore()
        self._num_waiting = 0
        self._num_received = 0
        """Bytes of bodies that have not come whole."""

    async def read(self, request: Request, use: Callable[[Any], T], max_prompt_len: int) -> T:
        """What ``use`` makes of the JSON of a body; it runs in a worker thread.

        max_prompt_len: tokens of the longest prompt that is taken. Raises ApiError for a body that is too large, too
        slow, or no JSON, and QueueFullError where too many large ones wait.
        """
        data = await self._receive(request)
        if len(data) <= LARGE_BODY_BYTES:
            return await to_thread.run_sync(lambda: use(parse(data)))
        if self._num_waiting >= MAX_LARGE_BODIES:
            raise QueueFullError(f"{MAX_LARGE_BODIES} large bodies wait, and no more may")
        self._num_waiting += 1
        try:
            await self._large.acquire()
        finally:
            self._num_waiting -= 1
        pause = 0.0
        try:
            await self._check.check(request.url.path, data, max_prompt_len)
            began = time.perf_counter()
            try:
                return await to_thread.run_sync(_read_large, data, use)
            finally:
                pause = _PAUSE * (time.perf_counter() - began)
        finally:
            asyncio.get_running_loop().call_later(pause, self._large.release)

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

    async def close(self) -> None:
        """End the process that looks at large bodies."""
        await self._check.close()


def _read_large(data: bytes, use: Callable[[Any], T]) -> T:
    try:
        return use(parse(data))
    finally:
        return_freed()
