"""Errors of HTTP requests, in OpenAI's shape."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from specrun.errors import ContextLengthError, RequestError, SpecError
from specrun.openai.body import field_of
from specrun.openai.response_items import UnknownResponseError
from specrun.openai.shapes import error_body
from specrun.serve.engine import EngineStoppedError, QueueFullError

RETRY_SECONDS = 1
"""Seconds after which a client may try again when the queue was full."""
_CODES: dict[type[SpecError], str] = {
    ContextLengthError: "context_length_exceeded",
    UnknownResponseError: "previous_response_not_found",
}
_END = r"[^\s/:;,'\"()\[\]]"
_PATH = re.compile(rf"(?<![\w/:.~<])/(?:{_END}(?:[^/:;,'\"()\[\]]*{_END})?/)+(?:{_END}+/?)?")
"""An absolute path of two or more names; those of folders may have spaces."""


class ApiError(Exception):
    """An HTTP response that is an error."""

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
    message = without_paths(str(error))
    if isinstance(error, QueueFullError):
        return ApiError(429, message, code="queue_full", headers={"Retry-After": str(RETRY_SECONDS)})
    if isinstance(error, EngineStoppedError):
        return ApiError(503, message, code="stopped", headers={"Retry-After": str(RETRY_SECONDS)})
    if isinstance(error, RequestError):
        return ApiError(400, message, field_of(error), _CODES.get(type(error)))
    if isinstance(error, SpecError):
        return ApiError(500, message)
    return ApiError(500, "an error of the server itself; its log has it under the x-request-id of this answer")


def without_paths(message: str) -> str:
    """``message`` with file names in place of absolute paths, which clients need not know."""
    return _PATH.sub(lambda match: match[0].rstrip("/").rpartition("/")[2], message)


def _kind(status: int) -> str:
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    return kinds.get(status, "invalid_request_error" if status < 500 else "server_error")
