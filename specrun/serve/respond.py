"""From a body to its answer: whole, or as server-sent events. A client that leaves ends its requests."""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send
from typing_extensions import override

from specrun.errors import SpecError
from specrun.openai.answers import Answer, speculation, usage
from specrun.openai.body import OpenAIBody
from specrun.openai.shapes import Head, Shape
from specrun.serve.departure import ClientLeftError, unless_client_leaves
from specrun.serve.errors import as_api_error
from specrun.serve.generation import Generation
from specrun.serve.log import shown, write
from specrun.serve.model import Model
from specrun.serve.service import Service
from specrun.serve.tracing import TracedAnswers

LARGE_ANSWER = 1000
"""Number of tokens from which on a worker thread writes an answer."""
MAX_LOGGED_FIELDS = 32
"""Maximum number of unknown fields of a body that the log names."""


async def respond(service: Service, make_shape: Callable[[Model], Shape], request: Request) -> Response:
    """The answer to a body, in the shape that is made for its model. Raises ApiError and RequestError."""

    def read(model: Model, sent: Any) -> _Exchange:
        shape = make_shape(model)
        body = shape.read(sent, model.defaults, model.max_input_len)
        if body.ignored:
            write("ignored", {"id": request.state.id, "fields": [*map(shown, body.ignored[:MAX_LOGGED_FIELDS])]})
        return _Exchange(model, shape, body, model.answers(body, key), spend_tokens)

    key = request.state.key
    service.rates.admit(key)
    spend_tokens = partial(service.rates.spend_tokens, key)
    exchange = await service.read(request, read)
    request.state.log, request.state.traced = exchange.log_fields(service.log_prompts), exchange.traced
    if exchange.is_streamed:
        return _EventStream(exchange, request.state.log)
    try:
        return await unless_client_leaves(request.receive, exchange.whole())
    finally:
        request.state.log.update(exchange.log_results())


class _Exchange:
    """One body and its answer."""

    def __init__(
        self,
        model: Model,
        shape: Shape,
        body: OpenAIBody,
        answers: Sequence[Answer],
        spend_tokens: Callable[[int], None],
    ) -> None:
        """spend_tokens: counts tokens of the prompts and the answers."""
        self._spend_tokens = spend_tokens
        self._model, self._shape, self._body, self._answers = model, shape, body, answers
        self._head = Head(uuid.uuid4().hex, int(time.time()), model.name)
        self.traced = TracedAnswers(model.name, body, answers)

    @property
    def is_streamed(self) -> bool:
        """Whether the answer comes in events."""
        return self._body.stream

    def generation(self) -> Generation:
        """A new generation of the answers."""
        requests = [answer.request for answer in self._answers]
        self.traced.began = time.time_ns()
        model, spend = self._model, self._spend_tokens
        return Generation(model.engine, model.metrics, requests, spend, self._body.n, is_bounded=self._body.stream)

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
        # Megabytes of JSON take a second. Streams go on meanwhile.
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

    def log_fields(self, with_prompts: bool) -> dict[str, Any]:
        """The log's fields about the body."""
        fields = {"model": self._model.name, "answers": len(self._answers), "stream": self._body.stream}
        return fields | ({"prompts": list(self._body.prompts)} if with_prompts else {})

    def log_results(self) -> dict[str, Any]:
        """The log's fields about the answer."""
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
