"""What goes wrong with a request over HTTP, in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specrun.errors import ContextLengthError, RequestError
from specrun.openai.body import field_of
from specrun.openai.shapes import error_body
from specrun.serve.engine import EngineStoppedError, QueueFullError

RETRY_SECONDS = 1
"""Seconds after which a client that met a full queue may try again."""


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    @property
    def body(self) -> dict[str, Any]:
        """The body of the response, in the form of OpenAI's API."""
        return error_body(self.message, _kind(self.status), self.param, self.code)


def as_api_error(error: Exception) -> ApiError:
    """Map an exception to the HTTP error response."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full", headers={"Retry-After": str(RETRY_SECONDS)})
    if isinstance(error, EngineStoppedError):
        return ApiError(503, str(error), code="stopped", headers={"Retry-After": str(RETRY_SECONDS)})
    if isinstance(error, RequestError):
        code = "context_length_exceeded" if isinstance(error, ContextLengthError) else None
        return ApiError(400, str(error), field_of(error), code)
    return ApiError(500, str(error) or repr(error))


def _kind(status: int) -> str:
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    return kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
