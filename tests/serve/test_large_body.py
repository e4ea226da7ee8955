"""A large body is refused in a process of its own, for the reasons for which the server would refuse it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import psutil
import pytest

from specrun.serve.errors import ApiError
from specrun.serve.large_body import LargeBodies

CHAT, COMPLETION, TOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize"
RESPONSE, MESSAGE = "/v1/responses", "/v1/messages"
MESSAGES = [{"role": "user", "content": "a"}]
CONTINUED = {"input": [{"type": "item_reference", "id": "b"}, *MESSAGES * 1000], "previous_response_id": "a"}
FINE: list[tuple[str, Any]] = [
    (COMPLETION, {"prompt": "a", "x": 1}),
    (CHAT, {"messages": MESSAGES}),
    (TOKENIZE, {"messages": MESSAGES}),
    (RESPONSE, {**CONTINUED, "truncation": "auto"}),  # The server alone knows what is stored.
]
REFUSED: list[tuple[str, Any, str | None, str]] = [
    (COMPLETION, {"prompt": [1] * 100_000}, "prompt", "100000 tokens"),
    (COMPLETION, {"prompt": "a", "n": "many"}, "n", "n"),
    (CHAT, {"messages": MESSAGES * 1000}, "messages", "1000 messages"),
    (RESPONSE, {"input": "a", "conversation": "b"}, "conversation", "conversation"),
    (RESPONSE, CONTINUED, "input", "1001 messages"),
    (MESSAGE, {"max_tokens": 1, "messages": MESSAGES * 1000}, "messages", "1000 messages"),
    (TOKENIZE, {"prompt": 1.5}, "prompt", "prompt"),
]


@asynccontextmanager
async def looking() -> AsyncIterator[LargeBodies]:
    bodies = LargeBodies()
    yield bodies
    await bodies.close()


async def refusal(bodies: LargeBodies, path: str, data: bytes) -> ApiError | None:
    try:
        assert await bodies.check(path, data, {None: 48, "other": None}) is None
    except ApiError as error:
        return error
    return None


def test_bodies_one_after_the_other() -> None:
    async def check() -> None:
        async with looking() as bodies:
            for path, body in FINE:
                assert await refusal(bodies, path, json.dumps(body).encode()) is None
            for path, body, param, message in REFUSED:
                error = await refusal(bodies, path, json.dumps(body).encode())
                assert error is not None and error.status == 400 and error.param == param and message in error.message
            error = await refusal(bodies, COMPLETION, b'{"prompt": ')
            assert error is not None and "the body is not JSON" in error.message
            error = await refusal(bodies, "/elsewhere", b"no JSON")
            assert error is not None and "the body is not JSON" in error.message

    asyncio.run(check())


def test_a_process_that_was_killed_is_started_again() -> None:
    async def check() -> None:
        async with looking() as bodies:
            path, body = FINE[0]
            data = json.dumps(body).encode()
            before = psutil.Process().children()
            assert await refusal(bodies, path, data) is None
            (started,) = {*psutil.Process().children()} - {*before}
            started.kill()
            while started.is_running():  # Until asyncio has asked how it ended.
                await asyncio.sleep(0.01)
            error = await refusal(bodies, path, data)
            assert error is not None and "could not be read" in error.message
            assert await refusal(bodies, path, data) is None

    asyncio.run(check())


def test_a_process_that_never_works_refuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    async def check() -> None:
        async with looking() as bodies:
            assert await refusal(bodies, COMPLETION, b'{"prompt": 1.5}') is None

    for program in ("/bin/false", "/nowhere"):
        monkeypatch.setattr("sys.executable", program)
        asyncio.run(check())


def test_a_client_that_left_takes_no_answer_from_the_next() -> None:
    async def check() -> None:
        async with looking() as bodies:
            path, body, *_ = REFUSED[0]
            asked = asyncio.create_task(bodies.check(path, json.dumps(body).encode(), {None: 48}))
            await asyncio.sleep(0.01)
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
            assert await refusal(bodies, FINE[0][0], json.dumps(FINE[0][1]).encode()) is None

    asyncio.run(check())
