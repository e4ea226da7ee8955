"""Handlers of ``/v1/responses`` and the paths below it."""

from __future__ import annotations

from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from specrun.arguments import show
from specrun.errors import RequestError
from specrun.openai.response_items import StoredResponse
from specrun.openai.responses import ResponseShape
from specrun.serve.errors import ApiError
from specrun.serve.model import Model
from specrun.serve.respond import respond
from specrun.serve.service import Service

MAX_LISTED = 100
"""Maximum number of items in one list."""
DEFAULT_LISTED = 20


async def create(service: Service, request: Request) -> Response:
    """The response to a body."""
    return await respond(service, lambda model: _shape(service, model, request), request)


async def count_input_tokens(service: Service, request: Request) -> Response:
    """The number of tokens that a body's prompt has."""

    def read(model: Model, sent: Any) -> list[int]:
        return model.prompt_ids(_shape(service, model, request).read(sent, model.defaults, model.max_input_len))

    ids = await service.read(request, read)
    return JSONResponse({"object": "response.input_tokens", "input_tokens": len(ids)})


async def retrieve(service: Service, request: Request) -> Response:
    """A stored response."""
    if request.query_params.get("stream") == "true":
        raise ApiError(400, "stream: only new responses are streamed; leave it out", "stream")
    return JSONResponse(_stored(service, request).response)


async def delete(service: Service, request: Request) -> Response:
    """Forget a stored response."""
    identity = request.path_params["id"]
    if not service.responses.remove(request.state.key, identity):
        raise _unknown(identity)
    return JSONResponse({"id": identity, "object": "response", "deleted": True})


async def list_input_items(service: Service, request: Request) -> Response:
    """The items that a stored response answers, a page at a time."""
    items, query = [*_stored(service, request).items], request.query_params
    if (order := query.get("order", "desc")) not in ("asc", "desc"):
        raise RequestError(f"order {show(order)}: expected asc or desc", "order")
    limit = query.get("limit", str(DEFAULT_LISTED))
    if not (limit.isdecimal() and len(limit) < 5 and 1 <= int(limit) <= MAX_LISTED):
        raise RequestError(f"limit {show(limit)}: expected 1 to {MAX_LISTED}", "limit")
    if order == "desc":
        items.reverse()
    if after := query.get("after"):
        ids = [item["id"] for item in items]
        if after not in ids:
            raise RequestError(f"after {show(after)}: no item of this response has this id", "after")
        items = items[ids.index(after) + 1 :]
    page = items[: int(limit)]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return JSONResponse({"object": "list", "data": page, **ends, "has_more": len(items) > len(page)})


def _shape(service: Service, model: Model, request: Request) -> ResponseShape:
    """The shape of a model's answer to one caller."""
    key, store = request.state.key, service.responses
    keep = partial(store.put, key) if store.keeps else None
    return ResponseShape(partial(store.find, key), keep, model.fits)


def _stored(service: Service, request: Request) -> StoredResponse:
    """The response that the path names. Raises ApiError."""
    identity = request.path_params["id"]
    if (stored := service.responses.find(request.state.key, identity)) is None:
        raise _unknown(identity)
    return stored


def _unknown(identity: str) -> ApiError:
    return ApiError(404, f"response {show(identity)}: not stored here, or not any more", "response_id")
