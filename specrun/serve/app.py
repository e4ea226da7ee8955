"""The HTTP application: routes, their handlers, and errors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import cache, partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from specrun import __version__
from specrun.errors import SpecError
from specrun.openai.body import read_either
from specrun.openai.fields import Fields, as_object
from specrun.openai.messages import MessageShape, error_body
from specrun.openai.prompts import are_ids
from specrun.openai.shapes import ChatShape, CompletionShape
from specrun.serve import openapi, response_routes
from specrun.serve.access import AccessMiddleware, error_response
from specrun.serve.departure import ClientLeftError
from specrun.serve.errors import ApiError, as_api_error, without_paths
from specrun.serve.log import log
from specrun.serve.metrics import CONTENT_TYPE
from specrun.serve.model import Model
from specrun.serve.rate_limits import HEADERS
from specrun.serve.respond import respond
from specrun.serve.service import Service

RESPONSES = "/v1/responses"
MESSAGES = "/v1/messages"
"""The path of Anthropic's API, whose errors have another shape."""


def make_app(service: Service) -> ASGIApp:
    """The application. It answers errors in the shape of each path's API."""
    routes = [Route(path, partial(handler, service), methods=[method]) for method, path, handler in _ROUTES]
    errors = (ApiError, SpecError, ClientLeftError, HTTPException, Exception)
    app = Starlette(routes=routes, exception_handlers=dict.fromkeys(errors, _error))
    access, origins = AccessMiddleware(service, app), service.listening.origins
    if not origins:
        return access
    # In front of the check of keys: browsers send preflight requests without one.
    methods = ("GET", "POST", "DELETE")
    return CORSMiddleware(access, origins, methods, allow_headers=["*"], expose_headers=["x-request-id", *HEADERS])


async def _completions(service: Service, request: Request) -> Response:
    """Prompts to texts, whole or as server-sent events."""
    return await respond(service, lambda _: CompletionShape(), request)


async def _chat(service: Service, request: Request) -> Response:
    """A conversation to its next message, whole or as server-sent events."""
    return await respond(service, lambda _: ChatShape(), request)


async def _messages(service: Service, request: Request) -> Response:
    """A conversation to its next message, in Anthropic's Messages API."""
    return await respond(service, lambda _: MessageShape(), request)


async def _count_tokens(service: Service, request: Request) -> Response:
    """The tokens of a message's prompt."""

    def read(model: Model, sent: Any) -> list[int]:
        fields = Fields(as_object("body", sent))
        return model.prompt_ids(MessageShape().read_prompt(fields, {}, model.defaults, model.max_input_len))

    return JSONResponse({"input_tokens": len(await service.read(request, read))})


async def _models(service: Service, request: Request) -> Response:
    """The models."""
    return JSONResponse({"object": "list", "data": service.models.names.descriptions()})


async def _model(service: Service, request: Request) -> Response:
    """One model, by its name or an alias."""
    return JSONResponse(service.models.names.description(request.path_params["model"]))


async def _tokenize(service: Service, request: Request) -> Response:
    """A ``prompt`` or ``messages`` to token ids, as in vLLM."""

    def read(model: Model, body: Any) -> dict[str, Any]:
        parsed = read_either(body, max_prompt_len=model.max_input_len)
        if len(parsed.prompts) != 1:
            raise ApiError(400, "prompt: expected one text", "prompt")
        ids = model.prompt_ids(parsed)
        return {"tokens": ids, "count": len(ids), "max_model_len": model.max_seq_len}

    return JSONResponse(await service.read(request, read))


async def _detokenize(service: Service, request: Request) -> Response:
    """``tokens`` to their text, as in vLLM."""

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
    """Whether the server would accept a request now."""
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
    """This description, in OpenAPI's format."""
    return JSONResponse(_description())


async def _docs(service: Service, request: Request) -> Response:
    """This description as a page."""
    policy = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}
    return HTMLResponse(openapi.page(_description()), headers=policy)


async def _error(request: Request, error: Exception) -> Response:
    """Map an exception to its response. A client that has left gets an empty one."""
    if isinstance(error, ClientLeftError):
        return Response(status_code=499)
    if isinstance(error, HTTPException):
        error = ApiError(error.status_code, str(error.detail), headers=error.headers)
    api_error = as_api_error(error)
    if api_error.status == 500:
        log.error("%s: %r", request.state.id, error, exc_info=error)
    if request.url.path.startswith(MESSAGES):
        return JSONResponse(error_body(api_error.body), api_error.status, api_error.headers)
    return error_response(api_error)


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
