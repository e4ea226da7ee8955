"""Checks prompts and messages of OpenAI's bodies, and converts them for the decoder and chat templates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from specrun.errors import ContextLengthError, RequestError
from specrun.openai.fields import as_object, wrong
from specrun.request.factory import Message, Prompt

MAX_PROMPTS = 256
"""Maximum number of prompts in one body."""
ROLES = ("system", "developer", "user", "assistant", "tool")
_LARGEST_ID = 1 << 63
"""Bound of token ids, which are 64-bit integers. The decoder checks them against the vocabulary."""


def read_prompts(name: str, value: Any, max_len: int | None = None) -> Sequence[Prompt]:
    """A text, token ids, or several of both. Raises RequestError.

    max_len: maximum tokens of a prompt; more ids are a ContextLengthError. None: any number.
    """
    several = isinstance(value, list) and bool(value) and isinstance(value[0], str | list)
    prompts = value if several else [value]
    if len(prompts) > MAX_PROMPTS:
        raise RequestError(f"{name}: {len(prompts)} prompts, expected at most {MAX_PROMPTS}", name)
    for number, prompt in enumerate(prompts):
        where = f"{name}[{number}]" if several else name
        if isinstance(prompt, list) and max_len is not None and len(prompt) > max_len:
            raise ContextLengthError(f"{where}: {len(prompt)} tokens, the engine's max_input_len is {max_len}", name)
        if not isinstance(prompt, str) and not are_ids(prompt):
            raise wrong(where, prompt, "a text, token ids, or a list of both", name)
        if not prompt:
            raise RequestError(f"{where}: empty; a text needs at least one token to follow", name)
    return prompts


def are_ids(value: object) -> TypeGuard[list[int]]:
    """Whether ``value`` is a list of token ids. JSON's true is not one, though Python's True is a number."""
    return isinstance(value, list) and all(type(item) is int and 0 <= item < _LARGEST_ID for item in value)


def read_messages(name: str, value: Any, max_len: int | None = None) -> Sequence[Message]:
    """The messages of a conversation. Raises RequestError.

    max_len: maximum tokens of a prompt; more messages are a ContextLengthError. None: any number.
    """
    if not isinstance(value, list) or not value:
        raise wrong(name, value, "a list of messages")
    if max_len is not None and len(value) > max_len:
        message = f"prompt: {len(value)} messages, the engine's max_input_len is {max_len} tokens"
        raise ContextLengthError(message, name)
    messages = [_message(f"{name}[{number}]", message) for number, message in enumerate(value)]
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    names = {call["id"]: call["function"]["name"] for call in calls if isinstance(call.get("id"), str)}
    return [_with_name(message, names) for message in messages]


def _with_name(message: Message, names: Mapping[str, str]) -> Message:
    """A tool's result with the function's name, which OpenAI's messages leave out and some templates need."""
    if message["role"] != "tool" or message.get("name") or message["tool_call_id"] not in names:
        return message
    return {**message, "name": names[message["tool_call_id"]]}


def _message(where: str, message: Any) -> Message:
    """A message with its content as one text. The role developer becomes system, which templates support."""
    fields = dict(as_object(where, message))
    role, content, calls = fields.get("role"), fields.get("content"), fields.pop("tool_calls", None)
    if role not in ROLES:
        raise wrong(f"{where}.role", role, f"one of {', '.join(ROLES)}")
    if isinstance(content, list):
        content = "\n".join(_text_part(f"{where}.content[{number}]", part) for number, part in enumerate(content))
    if calls and role == "assistant":
        fields["tool_calls"] = _calls(f"{where}.tool_calls", calls)
    elif calls:
        raise RequestError(f"{where}.tool_calls: only messages of the role assistant have them", f"{where}.tool_calls")
    if not isinstance(content, str) and (content is not None or "tool_calls" not in fields):
        raise wrong(f"{where}.content", content, "a text, or a list of parts of type text")
    if role == "tool":
        _text(f"{where}.tool_call_id", fields.get("tool_call_id"))
    return {**fields, "role": "system" if role == "developer" else role, "content": content}


def _text_part(where: str, part: Any) -> str:
    kind = as_object(where, part).get("type")
    if kind != "text":
        raise wrong(f"{where}.type", kind, "text, the only type that is supported")
    return _text(f"{where}.text", part.get("text"))


def _calls(where: str, calls: Any) -> list[dict[str, Any]]:
    """The calls of an assistant's message, with their arguments as objects, which templates format."""
    if not isinstance(calls, list):
        raise wrong(where, calls, "a list of calls")
    return [_call(f"{where}[{number}]", call) for number, call in enumerate(calls)]


def _call(where: str, call: Any) -> dict[str, Any]:
    kind = as_object(where, call).get("type", "function")
    if kind != "function":
        raise wrong(f"{where}.type", kind, "function")
    function = as_object(f"{where}.function", call.get("function"))
    _text(f"{where}.function.name", function.get("name"))
    text = function.get("arguments")
    try:
        values = json.loads(text or "{}") if isinstance(text, str | None) else text
    except (ValueError, RecursionError):
        values = None
    if not isinstance(values, dict):
        raise wrong(f"{where}.function.arguments", text, "a JSON object as text")
    return {**call, "type": "function", "function": {**function, "arguments": values}}


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise wrong(name, value, "a text")
    return value
