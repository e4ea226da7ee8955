"""The middleware in front of all handlers: a request's id, its API key, its line in the log and its trace."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.flow_control import CLOSE_HEADER

from specrun.serve.connection import IS_SPARE
from specrun.serve.errors import RETRY_SECONDS, ApiError
from specrun.serve.hosts import require_allowed
from specrun.serve.keys import ApiKey, find_key
from specrun.serve.log import shown, write
from specrun.serve.service import Service

OPEN_PATHS = ("/health", "/ready")
"""Paths that need no key, and are answered to every name and on spare connections."""
DESCRIPTIONS = ("/docs", "/openapi.json")
"""Paths that need no key: browsers show them, and all servers have the same."""


class AccessMiddleware:
    """Gives a request its id, checks its key, and logs it in one line."""

    def __init__(self, service: Service, app: ASGIApp) -> None:
        self._service, self._app = service, app
        self._root = f"{service.listening.root_path or ''}/"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, as ASGI calls it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if scope["path"].startswith(self._root):
            scope["path"] = "/" + scope["path"].removeprefix(self._root)
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        began, status, is_spare = time.time_ns(), 0, IS_SPARE in scope.get("state", {})
        state = scope["state"] = {
            "id": headers.get(b"x-request-id", "")[:64] or uuid.uuid4().hex,
            "key": None,
            "model": None,
            "traced": None,
            "log": {},
        }

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                more = {"x-request-id": str(state["id"]), **self._service.rates.headers(state["key"])}
                encoded = [(name.encode(), value.encode("latin-1")) for name, value in more.items()]
                message["headers"] = [*message["headers"], *encoded, *([CLOSE_HEADER] if is_spare else ())]
            await send(message)

        try:
            try:
                _require_one_length(headers)
                if scope["path"] not in OPEN_PATHS:
                    _refuse_spare(is_spare)
                    state["key"] = self._admit(scope["path"], headers)
            except ApiError as refusal:
                if not is_spare:
                    refusal.headers["Connection"] = "close"  # Or an unused body would be read to its end.
                await error_response(refusal)(scope, receive, send_with_id)
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
        method, path, ended = scope["method"], scope["path"], time.time_ns()
        if path in (*OPEN_PATHS, "/metrics") and status == 200:
            return
        line = {"id": state["id"], "method": shown(method), "path": shown(path), "status": status}
        write("request", line | {"seconds": round((ended - began) / 1e9, 6)} | state["log"])
        if self._service.tracing:
            traced = state["traced"]
            self._service.tracing.record(method, path, headers, began, ended, status, state["id"], traced)

    def _admit(self, path: str, headers: Mapping[bytes, str]) -> ApiKey | None:
        """The key of a request; None where none is needed. Raises ApiError for one that may not use the server."""
        if self._service.allowed_hosts is not None:
            require_allowed(headers, self._service.allowed_hosts, self._service.listening.origins)
        if not self._service.keys or path in DESCRIPTIONS:
            return None
        authorization = headers.get(b"authorization", "")
        if not authorization and (secret := headers.get(b"x-api-key")):  # Anthropic's header.
            authorization = f"Bearer {secret}"
        if key := find_key(list(self._service.keys), authorization):
            return key
        raise ApiError(401, "no valid API key; send it as 'Authorization: Bearer KEY'", code="invalid_api_key")


def error_response(error: ApiError) -> Response:
    """The response of an error, in OpenAI's shape."""
    return JSONResponse(error.body, error.status, error.headers)


def _require_one_length(headers: Mapping[bytes, str]) -> None:
    """Raise ApiError where two headers give a body's length: the rest may be taken for another request."""
    if b"content-length" in headers and b"transfer-encoding" in headers:
        raise ApiError(400, "Content-Length and Transfer-Encoding cannot be combined; send one of them")


def _refuse_spare(is_spare: bool) -> None:
    """Raise ApiError on a spare connection."""
    if is_spare:
        message = "too many connections are open, of all clients or of yours; close some, or try again"
        raise ApiError(503, message, code="too_many_connections", headers={"Retry-After": str(RETRY_SECONDS)})
