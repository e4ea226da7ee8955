"""Parses the JSON of a body with the results of Python's json, in half the time."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any, NoReturn

from pydantic_core import from_json

from specrun.serve.errors import ApiError


def parse(data: bytes) -> Any:
    """The value of a JSON text. Holds the interpreter's lock all the time. Raises ApiError."""
    with suppress(ValueError):  # json reads what pydantic refuses, or explains the error.
        return from_json(data, allow_inf_nan=False)
    try:
        return json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # Texts that are not UTF-8 and numbers too long are ValueErrors.
        raise ApiError(400, f"the body is not JSON ({error})") from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")
