"""Reading a request's body without trusting it."""

from __future__ import annotations

import asyncio
import json
from typing import Any, NoReturn

from starlette.requests import ClientDisconnect, Request

from specrun.serve.errors import ApiError
from specrun.serve.limits import MAX_BODY_BYTES, MAX_BODY_SECONDS


async def read_json(request: Request) -> Any:
    """The JSON of a body. Raises ApiError for one that is too large, too slow, or no JSON."""
    try:
        async with asyncio.timeout(MAX_BODY_SECONDS):
            data = await _read(request)
    except TimeoutError:
        raise ApiError(408, f"the body took longer than {MAX_BODY_SECONDS:.0f} s") from None
    except ClientDisconnect:
        raise ApiError(400, "the client left before its body had ended") from None
    try:
        return json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # Texts that are not UTF-8 and numbers too long are ValueErrors.
        raise ApiError(400, f"the body is not JSON ({error})") from error


async def _read(request: Request) -> bytes:
    size, parts = 0, []
    async for part in request.stream():
        size += len(part)
        if size > MAX_BODY_BYTES:
            raise ApiError(413, f"the body is larger than {MAX_BODY_BYTES} bytes")
        parts.append(part)
    return b"".join(parts)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
