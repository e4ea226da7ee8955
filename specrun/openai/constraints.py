"""Fields of bodies that constrain the output: OpenAI's ``response_format``, and vLLM's fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specrun import arguments
from specrun.errors import RequestError
from specrun.openai.fields import Fields, as_object, wrong

_GUIDED = {
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
_STRUCTURED = {
    "json": "json_schema",
    "json_object": "json_object",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
}
"""Fields of ``structured_outputs``."""


def read_constraint(fields: Fields) -> dict[str, Any]:
    """The options that constrain the output; empty where a body has no such field.

    ``RequestOptions`` and the compiler of grammars check their values. Raises RequestError.
    """
    constraint = fields.take("response_format", _response_format) or {}
    for name, option in _GUIDED.items():
        if (value := fields.pop(name)) is not None:
            constraint[option] = value
    structured = Fields(fields.take("structured_outputs", as_object) or {}, "structured_outputs.")
    for name, option in _STRUCTURED.items():
        if (value := structured.pop(name)) is not None:
            constraint[option] = value
    if structured.unread:
        name = next(iter(structured.unread))
        raise RequestError(f"structured_outputs.{name[:64]}: not supported; leave it out", "structured_outputs")
    return constraint


def _response_format(name: str, value: Any) -> dict[str, Any]:
    kind = arguments.text(f"{name}.type", as_object(name, value).get("type"))
    if kind == "text":
        return {}
    if kind == "json_object":
        return {"json_object": True}
    if kind != "json_schema":
        raise wrong(f"{name}.type", kind, "text, json_object or json_schema", name)
    json_schema: Mapping[str, Any] = as_object(f"{name}.json_schema", value.get("json_schema"))
    schema = json_schema.get("schema")
    return {"json_schema": {} if schema is None else schema}
