"""The OpenAPI description of the server, and a page that shows it. Dataclasses declare most fields of bodies."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple, get_args, get_origin, get_type_hints

from specrun import __version__
from specrun.arguments import Limit, split_union
from specrun.field_options import docstrings
from specrun.openai.body import DEFAULTS, MAX_N, OPENAI_NAMES
from specrun.request.options import RequestOptions
from specrun.sampling.limits import MAX_LOGPROBS
from specrun.sampling.sampler import SamplingParams

Schema = dict[str, Any]


class Operation(NamedTuple):
    """A path with its method."""

    method: str
    path: str
    summary: str


def _field(kind: str, description: str, **more: Any) -> Schema:
    return {"type": kind, "description": description, **more}


_KINDS: dict[Any, str] = {int: "integer", float: "number", bool: "boolean", str: "string"}
_OBJECTS = {"items": {"type": "object"}}
_MODEL = {
    "model": _field("string", "Name or alias of a model; it may be missing where there is one."),
    "stream": _field("boolean", "Send the answer as server-sent events.", default=False),
}
_TOOLS = {
    "tools": _field("array", "Functions that the model may call.", **_OBJECTS),
    "tool_choice": {"description": "Whether functions are called, and which."},
}
_PARALLEL = {"parallel_tool_calls": _field("boolean", "Several calls may be in one answer.", default=True)}
_BOTH = {
    **_MODEL,
    "n": _field("integer", "Answers to each prompt.", minimum=1, maximum=MAX_N, default=1),
    "best_of": _field("integer", "The same as n."),
    "max_tokens": _field("integer", "Most tokens of output.", minimum=0),
    "max_completion_tokens": _field("integer", "The same as max_tokens.", minimum=0),
    "ignore_eos": _field("boolean", "No token ends the output before max_tokens."),
    "stream_options": _field("object", "include_usage, continuous_usage_stats."),
    "user": _field("string", "Changes nothing."),
    "response_format": _field("object", "text, json_object, or json_schema with a schema."),
    "structured_outputs": _field("object", "vLLM's constraints: json, json_object, regex, choice, grammar."),
    "guided_json": {"description": "The output is JSON of this schema."},
}
_COMPLETION = {"prompt": {"description": "A text, token ids, or a list of both."}, **_BOTH}
_CHAT = {
    "messages": _field("array", "The conversation.", **_OBJECTS),
    **_BOTH,
    **_TOOLS,
    **_PARALLEL,
    "logprobs": _field("boolean", "Log-probabilities of every token.", default=False),
    "top_logprobs": _field("integer", "Likeliest tokens beside each.", minimum=0, maximum=MAX_LOGPROBS),
    "reasoning_effort": _field("string", "How much the model thinks, for its chat template."),
}
_RESPONSE = {
    "input": {"description": "A text, or the items of a conversation."},
    **_MODEL,
    "instructions": _field("string", "The system message."),
    "max_output_tokens": _field("integer", "Most tokens of output.", minimum=1),
    "previous_response_id": _field("string", "A stored response that this one continues."),
    "store": _field("boolean", "Keep the response for later ones.", default=True),
    "truncation": {"enum": ["auto", "disabled"], "description": "auto: the oldest items go if they do not fit."},
    "include": _field("array", "What else the response has.", items={"type": "string"}),
    "top_logprobs": _CHAT["top_logprobs"],
    "reasoning": _field("object", "effort: how much the model thinks."),
    "text": _field("object", "format: text, json_object, or json_schema with a schema."),
    "metadata": _field("object", "Returned as it is."),
    **_TOOLS,
    **_PARALLEL,
}
_MESSAGE = {
    "messages": _CHAT["messages"],
    "max_tokens": _field("integer", "Most tokens of output.", minimum=1),
    **_MODEL,
    "system": {"description": "The system message: a text, or blocks of text."},
    "stop_sequences": {"type": "array", "items": {"type": "string"}, "description": "Texts that end the output."},
    "thinking": _field("object", "budget_tokens: most tokens of a thought."),
    **_TOOLS,
}
_NOT_IN_BODIES = ("max_output_len", "reuse_blocks", "json_schema", "json_object", "tools")
"""Options of requests that are no fields of bodies, or are described above."""
_OF_CHATS = ("chat_template_kwargs", "add_generation_prompt", "continue_final_message")


def _fields_of(owner: type, defaults: Any, *excluded: str) -> dict[str, Schema]:
    """The fields of a body that are those of a dataclass."""
    fields: dict[str, Schema] = {}
    for name, hint in get_type_hints(owner, include_extras=True).items():
        field = OPENAI_NAMES.get(name, name)
        if field is None or name in excluded:
            continue
        sentence = docstrings(owner).get(name, "").partition("\n\n")[0].replace("``", "")
        default = getattr(defaults, name)
        schema = _schema(hint)
        expected = schema.pop("expected", "")
        fields[field] = schema | {"description": sentence + (f" Expected: {expected}." if expected else "")}
        if isinstance(default, int | float | str):
            fields[field]["default"] = default
    return fields


def _schema(hint: Any) -> Schema:
    """The JSON schema of a type. A limit that JSON schemas cannot express is a text under ``expected``."""
    limit: Any = None
    if get_origin(hint) is Annotated:
        hint, limit = get_args(hint)
    kinds, words = split_union(hint)
    schemas = [_kind(kind) for kind in kinds] + ([{"enum": [*words]}] if words else [])
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
    if isinstance(limit, Limit):
        bounds = {"minimum": limit.least, "maximum": limit.most}
        schema |= {name: bound for name, bound in bounds.items() if bound is not None}
        schema |= {} if limit.least is not None else {"expected": limit.expected}
    return schema


def _kind(kind: Any) -> Schema:
    if get_origin(kind) is Annotated:
        return {name: value for name, value in _schema(kind).items() if name != "expected"}
    if get_origin(kind) is Sequence:
        return {"type": "array", "items": _kind(get_args(kind)[0])}
    if get_origin(kind) is Mapping:
        return {"type": "object"}
    return {"type": _KINDS[kind]} if kind in _KINDS else {}


def bodies() -> dict[str, Schema]:
    """Schemas of bodies, by path."""
    sampling = _fields_of(SamplingParams, DEFAULTS)
    options = _fields_of(RequestOptions, RequestOptions(), *_NOT_IN_BODIES)
    for_chats = {name: options.pop(name) for name in _OF_CHATS}
    completion = {**_COMPLETION, **options, **sampling}
    chat = {**options, **for_chats, **sampling, **_CHAT}
    chat.pop("echo")
    model = {"model": _MODEL["model"]}
    texts = {**model, "prompt": _COMPLETION["prompt"], "messages": _CHAT["messages"]}
    ids = {**model, "tokens": _field("array", "Token ids.", items={"type": "integer"})}
    response, message = {**_RESPONSE, **sampling}, {**_MESSAGE, **sampling}
    return {
        "/v1/completions": _object(completion, "prompt"),
        "/v1/chat/completions": _object(chat, "messages"),
        "/v1/responses": _object(response, "input"),
        "/v1/responses/input_tokens": _object(response, "input"),
        "/v1/messages": _object(message, "messages", "max_tokens"),
        "/v1/messages/count_tokens": _object(message, "messages"),
        "/tokenize": _object(texts),
        "/detokenize": _object(ids, "tokens"),
    }


def _object(properties: dict[str, Schema], *required: str) -> Schema:
    return {"type": "object", "properties": properties} | ({"required": [*required]} if required else {})


def describe(operations: Sequence[Operation]) -> dict[str, Any]:
    """The description, by OpenAPI 3.1 (https://spec.openapis.org/oas/v3.1.0)."""
    paths: dict[str, dict[str, Any]] = {}
    schemas = bodies()
    for method, path, summary in operations:
        names = [part[1:-1] for part in path.replace(":path", "").split("/") if part.startswith("{")]
        operation: dict[str, Any] = {
            "summary": summary.replace("``", ""),
            "responses": {"200": {"description": "The answer."}},
        }
        if names:
            parameter = {"in": "path", "required": True, "schema": {"type": "string"}}
            operation["parameters"] = [{"name": name, **parameter} for name in names]
        if path in schemas and method == "POST":
            operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schemas[path]}}}
            operation["responses"]["default"] = {"description": "An error, in the shape of the path's API."}
        paths.setdefault(path.replace(":path", ""), {})[method.lower()] = operation
    key = {"key": {"type": "http", "scheme": "bearer"}}
    return {
        "openapi": "3.1.0",
        "info": {"title": "specrun", "version": __version__},
        "paths": paths,
        "components": {"securitySchemes": key},
        "security": [{}, {"key": []}],
    }


def page(description: Mapping[str, Any]) -> str:
    """The description as a page that loads nothing else."""
    info, parts = description["info"], []
    for path, methods in description["paths"].items():
        for method, operation in methods.items():
            parts.append(f"<h2>{method.upper()} {html.escape(path)}</h2><p>{html.escape(operation['summary'])}</p>")
            if body := operation.get("requestBody"):
                parts.append(_table(body["content"]["application/json"]["schema"]))
    style = "body{font:16px sans-serif;max-width:60em;margin:2em auto}td{padding:.1em .6em;vertical-align:top}"
    head = f"<!doctype html><html lang=en><meta charset=utf-8><title>specrun</title><style>{style}</style>"
    return f"{head}<h1>specrun {html.escape(info['version'])}</h1><p>OpenAPI: /openapi.json</p>{''.join(parts)}</html>"


def _table(schema: Schema) -> str:
    """The fields of a body."""
    rows = []
    for name, field in schema["properties"].items():
        needed = " (required)" if name in schema.get("required", ()) else ""
        default = f" Default: {field['default']}." if "default" in field else ""
        text = html.escape(field["description"] + default)
        rows.append(f"<tr><td><code>{html.escape(name)}</code>{needed}<td>{text}")
    return f"<table>{''.join(rows)}</table>"
