"""Items of the Responses API, of which a conversation consists. Pure functions translate them to a chat's messages."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from specrun import arguments
from specrun.errors import ContextLengthError, RequestError
from specrun.openai.fields import as_object, wrong

Item = Mapping[str, Any]
PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc", "function_call_output": "fco"}
"""Prefixes of ids, by type of item. The rest is that of the response's id after ``resp_``."""
_OF_CALLS = ("function_call", "function_call_output")
"""Types of items that name a call."""


class UnknownResponseError(RequestError):
    """A body continues a response that is not stored."""


class StoredResponse(NamedTuple):
    """A response that later ones may continue."""

    response: Mapping[str, Any]
    items: Sequence[Item]
    """Items that it answers: the conversation before it, and its input."""

    @property
    def conversation(self) -> list[Item]:
        """All items, with its output."""
        return [*self.items, *self.response["output"]]


def read_items(name: str, value: Any, find: Callable[[str], Item]) -> list[Item]:
    """An input's items: messages, calls, their outputs, and thoughts. Raises RequestError.

    find: returns the item of an earlier response by its id.
    """
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list):
        raise wrong(name, value, "a text or a list of items")
    items: list[Item] = []
    for number, item in enumerate(value):
        where = f"{name}[{number}]"
        kind = as_object(where, item).get("type") or "message"
        if kind == "item_reference":
            items.append(find(arguments.text(f"{where}.id", item.get("id"))))
            continue
        if not isinstance(kind, str) or kind not in PREFIXES:
            raise wrong(f"{where}.type", kind, f"{', '.join(PREFIXES)} or item_reference")
        if kind in _OF_CALLS:
            arguments.text(f"{where}.call_id", item.get("call_id"))
        items.append({**item, "type": kind})
    return items


def with_ids(items: Sequence[Item], response_id: str) -> list[Item]:
    """``items`` as the API lists them: each has an id, and messages have lists of parts."""
    identity = response_id.removeprefix("resp_")
    listed: list[Item] = []
    for number, item in enumerate(items):
        item_id = item.get("id")
        if not (isinstance(item_id, str) and item_id):
            item_id = f"{PREFIXES[item['type']]}_{identity}_in{number}"
        copy = {**item, "id": item_id}
        if item["type"] == "message" and isinstance(item.get("content"), str):
            part = {"type": "input_text", "text": item["content"]}
            if item.get("role") == "assistant":
                part |= {"type": "output_text", "annotations": []}
            copy["content"] = [part]
        listed.append(copy)
    return listed


def messages_of(name: str, items: Sequence[Item]) -> list[dict[str, Any]]:
    """Messages of a chat. A call belongs to the message before it, and a thought to the one after it.

    Raises RequestError.
    """
    messages: list[dict[str, Any]] = []
    thought = None
    for number, item in enumerate(items):
        kind = item["type"]
        if kind == "reasoning":
            thought = _thought(f"{name}[{number}].content", item.get("content"))
            continue
        if kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            output = _content(item.get("output"))
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
        else:
            messages.append({"role": item.get("role"), "content": _content(item.get("content"))})
        if thought and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = thought
        thought = None
    return messages


def fitting(items: Sequence[Item], fits: Callable[[Sequence[Item]], bool]) -> Sequence[Item]:
    """``items`` without the oldest, as many as needed for ``fits``; the fewest items if it is never true.

    ``fits`` may raise ContextLengthError in place of False. The result begins with a user's message, if possible.
    """
    users = [number for number, item in enumerate(items) if item.get("role") == "user"]
    starts = [0, *(number for number in users if number), *range((users or [0])[-1] + 1, len(items))]

    def is_short(start: int) -> bool:
        try:
            return fits(without_oldest(items, start))
        except ContextLengthError:
            return False

    index = bisect_left(starts, True, key=is_short)
    return without_oldest(items, starts[min(index, len(starts) - 1)])


def without_oldest(items: Sequence[Item], count: int) -> list[Item]:
    """``items`` without the first ``count``, except instructions, and without outputs of calls that are dropped."""
    instructions = [item for item in items[:count] if item.get("role") in ("system", "developer")]
    dropped = {item.get("call_id") for item in items[:count] if item["type"] == "function_call"}
    return instructions + [
        item
        for item in items[count:]
        if not (item["type"] == "function_call_output" and item.get("call_id") in dropped)
    ]


def _thought(where: str, content: Any) -> str:
    """The text of a thought of an earlier answer."""
    if not isinstance(content, list):
        return ""
    return "".join(arguments.text(where, as_object(where, part).get("text")) for part in content)


def _content(content: Any) -> Any:
    """A text, or its parts as chats have them. Other parts stay as they are, and ``read_messages`` refuses them."""
    if not isinstance(content, list):
        return content
    return [
        {"type": "text", "text": part.get("text")}
        if isinstance(part, Mapping) and part.get("type") in ("input_text", "output_text")
        else part
        for part in content
    ]
