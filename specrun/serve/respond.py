"""From a body to its answer: whole, or as server-sent events. A client that leaves ends its requests."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from specrun.errors import SpecError
from specrun.openai.answers import Answer, speculation, usage
from specrun.openai.body import OpenAIBody
from specrun.openai.shapes import Head, Shape
from specrun.serve.errors import as_api_error
from specrun.serve.generation import Generation
from specrun.serve.log import shown, write
from specrun.serve.service import Service, requests_of

T = TypeVar("T")
LARGE_ANSWER = 1000
"""Tokens of an answer that is written by a worker thread."""
MAX_LOGGED_FIELDS = 32
"""Number of unknown fields of a body that the log names."""


class ClientLeftError(Exception):
    """Nobody reads the answer any more."""


async def respond(service: Service, shape: Shape, request: Request) -> Response:
    """The answer to a completion's or a chat's body. Raises ApiError and RequestError."""

    def read(sent: Any) -> tuple[OpenAIBody, Sequence[Answer]]:
        body = shape.read(sent, service.defaults, service.max_input_len)
        if body.ignored:
            write("ignored", {"id": request.state.id, "fields": [*map(shown, body.ignored[:MAX_LOGGED_FIELDS])]})
        return body, service.answers(body, request.state.key)

    body, answers = await service.bodies.read(request, read, service.max_input_len)
    exchange = _Exchange(service, shape, body, answers)
    request.state.log = exchange.log_fields()
    if body.stream:
        return _EventStream(exchange, request.state.log)
    try:
        return await unless_client_leaves(request.receive, exchange.whole())
    finally:
        request.state.log.update(exchange.log_results())


class _Exchange:
    """One body and its answer."""

    def __init__(self, service: Service, shape: Shape, body: OpenAIBody, answers: Sequence[Answer]) -> None:
        self._service, self._shape, self._body, self._answers = service, shape, body, answers
        self._head = Head(uuid.uuid4().hex, int(time.time()), service.model)

    def generation(self) -> Generation:
        """A new generation of the answers."""
        requests = requests_of(self._answers)
        return Generation(self._service.engine, self._service.metrics, requests, is_bounded=self._body.stream)

    async def whole(self) -> Response:
        """The answer in one piece. Raises ApiError where a request failed."""
        with self.generation() as generation:
            async for number, update in generation:
                self._answers[number].add(update)
                if update.ended and update.ended.error:
                    raise as_api_error(update.ended.error)

        def make() -> Response:
            return JSONResponse(self._shape.whole(self._body, self._answers, self._head))

        size = sum(answer.ended.output_tokens for answer in self._answers if answer.ended)
        # Megabytes of JSON take a second, in which streams go on.
        return make() if size < LARGE_ANSWER else await to_thread.run_sync(make)

    async def events(self, generation: Generation, send: Callable[[str], Awaitable[None]]) -> None:
        """The answer in events; an error is an event too, and the last one."""
        stream = self._shape.stream(self._body, self._answers, self._head)
        for event in stream.begin():
            await send(event)
        try:
            async for number, update in generation:
                answer = self._answers[number]
                delta = answer.add(update)
                if update.ended and update.ended.error:
                    raise update.ended.error
                for event in stream.add(number, answer, delta):
                    await send(event)
            last = stream.end()
        except SpecError as error:
            last = stream.fail(as_api_error(error).body)
        for event in last:
            await send(event)

    def log_fields(self) -> dict[str, Any]:
        """What the log says of the body. Prompts only where the server was told to."""
        fields = {"answers": len(self._answers), "stream": self._body.stream}
        return fields | ({"prompts": list(self._body.prompts)} if self._service.log_prompts else {})

    def log_results(self) -> dict[str, Any]:
        """What the log says of the answer."""
        ends = [answer.ended for answer in self._answers if answer.ended]
        return {
            **usage(self._answers, self._body.n),
            **speculation(self._answers),
            "finish_reasons": [end.reason for end in ends],
            "queue_seconds": max((end.stats.queue_seconds for end in ends), default=None),
            "first_token_seconds": max((end.stats.first_token_seconds for end in ends), default=None),
        }


class _EventStream(Response):
    """Server-sent events (https://html.spec.whatwg.org/multipage/server-sent-events.html)."""

    def __init__(self, exchange: _Exchange, fields: dict[str, Any]) -> None:
        super().__init__(media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        del self.headers["content-length"]
        self._exchange, self._fields = exchange, fields

    @override
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def write(text: str) -> None:
            await send({"type": "http.response.body", "body": text.encode(), "more_body": True})

        try:
            with self._exchange.generation() as generation:  # A full queue is an error before anything is sent.
                start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
                await send(start)
                with suppress(ClientLeftError):
                    await unless_client_leaves(receive, self._exchange.events(generation, write))
                    await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._fields.update(self._exchange.log_results())


async def unless_client_leaves(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """What ``work`` returns. Raises ClientLeftError, and ends the work, as soon as the client closes its connection.

    The body must have been read.
    """
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_departure(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientLeftError
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _departure(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
