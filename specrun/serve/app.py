"""The HTTP application: routes, keys, errors, and a line of the log for every request."""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import CLOSE_HEADER

from specrun import __version__
from specrun.errors import SpecError
from specrun.openai.body import read_either
from specrun.openai.fields import Fields, as_object
from specrun.openai.messages import MessageShape, error_body
from specrun.openai.prompts import are_ids
from specrun.openai.shapes import ChatShape, CompletionShape
from specrun.serve import openapi, response_routes
from specrun.serve.connection import IS_SPARE
from specrun.serve.departure import ClientLeftError
from specrun.serve.errors import RETRY_SECONDS, ApiError, as_api_error, without_paths
from specrun.serve.hosts import require_allowed
from specrun.serve.keys import ApiKey, find_key
from specrun.serve.log import log, shown, write
from specrun.serve.metrics import CONTENT_TYPE
from specrun.serve.model import Model
from specrun.serve.rate_limits import HEADERS
from specrun.serve.respond import respond
from specrun.serve.service import Service

OPEN_PATHS = ("/health", "/ready")
"""Paths that need no key, and are answered to every name and on spare connections."""
DESCRIPTIONS = ("/docs", "/openapi.json")
"""Paths that need no key: browsers show them, and all servers have the same."""
RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
"""The path of Anthropic's API, whose errors have another shape."""


def make_app(service: Service) -> ASGIApp:
    """The application, which answers all errors in OpenAI's shape."""
    routes = [Route(path, partial(handler, service), methods=[method]) for method, path, handler in _ROUTES]
    known = (ApiError, SpecError, ClientLeftError, HTTPException, Exception)
    app = Starlette(routes=routes, exception_handlers=dict.fromkeys(known, _error))
    access, origins = _AccessMiddleware(service, app), service.listening.origins
    if not origins:
        return access
    # Before keys are looked at: browsers ask without one what they may send.
    methods = ("GET", "POST", "DELETE")
    return CORSMiddleware(access, origins, methods, allow_headers=["*"], expose_headers=["x-request-id", *HEADERS])


class _AccessMiddleware:
    """The middleware before all handlers: gives a request its id, checks its key, and logs it in one line."""

    def __init__(self, service: Service, app: ASGIApp) -> None:
        self._service, self._app = service, app
        self._below = f"{service.listening.root_path or ''}/"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"].startswith(self._below):
            scope["path"] = "/" + scope["path"].removeprefix(self._below)
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        given = scope.get("state", {})
        state = scope["state"] = {
            "id": headers.get(b"x-request-id", "")[:64] or uuid.uuid4().hex,
            "key": None,
            "model": None,
            "traced": None,
            "log": {},
        }
        began, status, is_spare = time.time_ns(), 0, IS_SPARE in given

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                told = {"x-request-id": str(state["id"]), **self._service.rates.headers(state["key"])}
                own = [(name.encode(), value.encode("latin-1")) for name, value in told.items()]
                message["headers"] = [*message["headers"], *own, *([CLOSE_HEADER] if is_spare else ())]
            await send(message)

        try:
            try:
                _require_one_length(headers)
                if scope["path"] not in OPEN_PATHS:
                    _require_own_place(is_spare)
                    state["key"] = self._admit(scope["path"], headers)
            except ApiError as refusal:
                if not is_spare:
                    refusal.headers["Connection"] = "close"  # Or an unused body would be read to its end.
                await _answer(refusal)(scope, receive, send_with_id)
                return
            await self._app(scope, receive, send_with_id)
        finally:
            if state["model"]:
                self._service.models.release(state["model"])
            self._record(scope, headers, state, status, began)

    def _record(
        self, scope: Scope, headers: Mapping[bytes, str], state: dict[str, Any], status: int, began: int
    ) -> None:
        """Log and trace a request. Status 0: the client left before an answer."""
        path, ended = scope["path"], time.time_ns()
        if path in (*OPEN_PATHS, "/metrics") and status == 200:
            return
        _log_request(scope, state, status, (ended - began) / 1e9)
        if self._service.tracing:
            traced = state["traced"]
            self._service.tracing.record(scope["method"], path, headers, began, ended, status, state["id"], traced)

    def _admit(self, path: str, headers: Mapping[bytes, str]) -> ApiKey | None:
        """The key of a request; None where none is needed. Raises ApiError for one that may not use the server."""
        if self._service.allowed_hosts is not None:
            require_allowed(headers, self._service.allowed_hosts, self._service.listening.origins)
        if not self._service.keys or path in DESCRIPTIONS:
            return None
        given = headers.get(b"authorization", "")
        if not given and (key_alone := headers.get(b"x-api-key")):  # Anthropic's header.
            given = f"Bearer {key_alone}"
        if key := find_key(list(self._service.keys), given):
            return key
        raise ApiError(401, "no valid API key; send it as 'Authorization: Bearer KEY'", code="invalid_api_key")


def _require_one_length(headers: Mapping[bytes, str]) -> None:
    """Raise ApiError where two headers say how long a body is: what is behind it may be taken for another request."""
    if b"content-length" in headers and b"transfer-encoding" in headers:
        raise ApiError(400, "Content-Length and Transfer-Encoding cannot be combined; send one of them")


def _require_own_place(is_spare: bool) -> None:
    """Raise ApiError on a spare connection."""
    if is_spare:
        message = "too many connections are open, of all clients or of yours; close some, or try again"
        raise ApiError(503, message, code="too_many_connections", headers={"Retry-After": str(RETRY_SECONDS)})


def _log_request(scope: Scope, state: dict[str, Any], status: int, seconds: float) -> None:
    path = shown(scope["path"])
    line = {"id": state["id"], "method": shown(scope["method"]), "path": path, "status": status}
    write("request", line | {"seconds": round(seconds, 6)} | state["log"])


async def _completions(service: Service, request: Request) -> Response:
    """Prompts to texts, whole or as server-sent events."""
    return await respond(service, lambda _: CompletionShape(), request)


async def _chat(service: Service, request: Request) -> Response:
    """A conversation to its next message, whole or as server-sent events."""
    return await respond(service, lambda _: ChatShape(), request)


async def _messages(service: Service, request: Request) -> Response:
    """The same in Anthropic's Messages API."""
    return await respond(service, lambda _: MessageShape(), request)


async def _count_tokens(service: Service, request: Request) -> Response:
    """The tokens of a message's prompt."""

    def read(model: Model, sent: Any) -> list[int]:
        fields = Fields(as_object("body", sent))
        return model.prompt_ids(MessageShape().read_prompt(fields, {}, model.defaults, model.max_input_len))

    return JSONResponse({"input_tokens": len(await service.read(request, read))})


async def _models(service: Service, request: Request) -> Response:
    """The models."""
    return JSONResponse({"object": "list", "data": service.models.descriptions()})


async def _model(service: Service, request: Request) -> Response:
    """One model, by its name or an alias."""
    return JSONResponse(service.models.description(request.path_params["model"]))


async def _tokenize(service: Service, request: Request) -> Response:
    """vLLM's: a ``prompt`` or ``messages`` to token ids."""

    def read(model: Model, body: Any) -> dict[str, Any]:
        parsed = read_either(body, max_prompt_len=model.max_input_len)
        if len(parsed.prompts) != 1:
            raise ApiError(400, "prompt: expected one text", "prompt")
        ids = model.prompt_ids(parsed)
        return {"tokens": ids, "count": len(ids), "max_model_len": model.max_seq_len}

    return JSONResponse(await service.read(request, read))


async def _detokenize(service: Service, request: Request) -> Response:
    """vLLM's: ``tokens`` to their text."""

    def read(model: Model, body: Any) -> str:
        ids, vocab = as_object("body", body).get("tokens"), model.decoder.target.graph.vocab_size
        if isinstance(ids, list) and len(ids) > model.max_seq_len:
            raise ApiError(400, f"tokens: {len(ids)} ids, expected at most {model.max_seq_len}", "tokens")
        if not are_ids(ids) or any(token >= vocab for token in ids):
            raise ApiError(400, f"tokens: expected a list of ids from 0 to {vocab - 1}", "tokens")
        return model.decoder.tokenizer.decode(ids, skip_special_tokens=False)

    return JSONResponse({"prompt": await service.read(request, read)})


async def _health(service: Service, request: Request) -> Response:
    """Whether the loaded models work."""
    if problem := service.models.problem():
        return JSONResponse({"status": "unhealthy", "reason": without_paths(problem)}, 503)
    return JSONResponse({"status": "ok"})


async def _ready(service: Service, request: Request) -> Response:
    """Whether a request would be taken now."""
    try:
        service.models.require_room()
    except SpecError as error:
        return JSONResponse({"status": "not ready", "reason": without_paths(str(error))}, 503)
    return await _health(service, request)


async def _metrics(service: Service, request: Request) -> Response:
    """Metrics for Prometheus."""
    return Response(service.models.metrics(), media_type=CONTENT_TYPE)


async def _version(service: Service, request: Request) -> Response:
    """The server's release."""
    return JSONResponse({"version": __version__})


async def _openapi(service: Service, request: Request) -> Response:
    """This description, by OpenAPI."""
    return JSONResponse(_description())


async def _docs(service: Service, request: Request) -> Response:
    """This description as a page."""
    policy = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
    return HTMLResponse(openapi.page(_description()), headers=policy)


async def _error(request: Request, error: Exception) -> Response:
    """The answer to a request that failed. Nobody reads that of a client that has left."""
    if isinstance(error, ClientLeftError):
        return Response(status_code=499)
    if isinstance(error, HTTPException):
        error = ApiError(error.status_code, str(error.detail), headers=error.headers)
    api_error = as_api_error(error)
    if api_error.status == 500:
        log.error("%s: %r", request.state.id, error, exc_info=error)
    if request.url.path.startswith(MESSAGES):
        return JSONResponse(error_body(api_error.body), api_error.status, api_error.headers)
    return _answer(api_error)


def _answer(error: ApiError) -> Response:
    return JSONResponse(error.body, error.status, error.headers)


@cache
def _description() -> dict[str, Any]:
    operations = (openapi.Operation(method, path, handler.__doc__ or "") for method, path, handler in _ROUTES)
    return openapi.describe([*operations])


_ROUTES: Sequence[tuple[str, str, Callable[[Service, Request], Awaitable[Response]]]] = (
    ("POST", "/v1/completions", _completions),
    ("POST", "/v1/chat/completions", _chat),
    ("POST", RESPONSES, response_routes.create),
    ("POST", f"{RESPONSES}/input_tokens", response_routes.count_input_tokens),
    ("GET", f"{RESPONSES}/{{id}}", response_routes.retrieve),
    ("DELETE", f"{RESPONSES}/{{id}}", response_routes.delete),
    ("GET", f"{RESPONSES}/{{id}}/input_items", response_routes.list_input_items),
    ("POST", MESSAGES, _messages),
    ("POST", f"{MESSAGES}/count_tokens", _count_tokens),
    ("GET", "/v1/models", _models),
    ("GET", "/v1/models/{model:path}", _model),
    ("POST", "/tokenize", _tokenize),
    ("POST", "/detokenize", _detokenize),
    ("GET", "/health", _health),
    ("GET", "/ready", _ready),
    ("GET", "/metrics", _metrics),
    ("GET", "/version", _version),
    ("GET", "/openapi.json", _openapi),
    ("GET", "/docs", _docs),
)
"""Methods, paths and handlers, whose docstrings describe them."""
