"""Clients that leave while the server works for them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

from starlette.types import Receive

T = TypeVar("T")


class ClientLeftError(Exception):
    """The client has closed its connection before the answer."""


async def unless_client_leaves(receive: Receive, work: Awaitable[T]) -> T:
    """Return the result of ``work``. Raises ClientLeftError, and cancels it, as soon as the client disconnects.

    The body must have been read.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeftError
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
