"""``/v1/messages``: Anthropic's Messages API for texts. A body is translated to a chat; its answer has another shape.

The fields are those of Anthropic's API reference. Fields that change no answer, such as ``cache_control``, are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from typing_extensions import override

from specrun import arguments
from specrun.errors import RequestError
from specrun.openai.answers import Answer, Delta, usage
from specrun.openai.body import OpenAIBody, read_chat
from specrun.openai.fields import Fields, as_object, wrong
from specrun.openai.output_items import Output, OutputItem
from specrun.openai.shapes import Head, Shape, Stream, named_event
from specrun.sampling.sampler import SamplingParams

_REFUSED: dict[str, tuple[Any, ...]] = {"mcp_servers": ([],), "container": (), "n": (1,), "prompt_logprobs": ()}
"""Known fields that are not supported, with their values without effect."""
_NO_CHANGE = ("metadata", "service_tier", "stream_options", "betas", "context_management")
"""Fields that are accepted and ignored."""
_EFFORTS = {"xhigh": "high", "max": "high"}
"""Levels of effort that chat templates do not know."""


class MessageShape(Shape):
    """The shape of a message."""

    @override
    def read(self, body: object, defaults: SamplingParams, max_prompt_len: int | None = None) -> OpenAIBody:
        """Raises RequestError."""
        fields = Fields(as_object("body", body))
        longest = fields.required("max_tokens", _positive)
        return self.read_prompt(fields, {"max_tokens": longest}, defaults, max_prompt_len)

    def read_prompt(
        self, fields: Fields, more: dict[str, Any], defaults: SamplingParams, max_prompt_len: int | None
    ) -> OpenAIBody:
        """Read a body's prompt and options. more: further fields of the chat. Raises RequestError."""
        fields.refuse(_REFUSED)
        for name in _NO_CHANGE:
            fields.unread.pop(name, None)
        messages = fields.required("messages", _messages)
        if system := fields.take("system", _text):
            messages.insert(0, {"role": "system", "content": system})
        tools, choice = fields.take("tools", _tools) or [], fields.take("tool_choice", as_object) or {}
        chat: dict[str, Any] = {**more, "messages": messages, "stop": fields.pop("stop_sequences") or None}
        variables = dict(fields.take("chat_template_kwargs", as_object) or {})
        config = Fields(fields.take("output_config", as_object) or {}, "output_config.")
        if form := config.take("format", as_object) or fields.take("output_format", as_object):
            chat["response_format"] = _response_format(form)
        if (effort := config.take("effort", arguments.text)) is not None:
            variables["reasoning_effort"] = _EFFORTS.get(effort, effort)
        if thinking := fields.take("thinking", as_object):
            variables["enable_thinking"] = thinking.get("type") != "disabled"
            chat["max_reasoning_tokens"] = thinking.get("budget_tokens")
        if variables:
            chat["chat_template_kwargs"] = variables
        if tools:
            chat |= {"tools": tools, "tool_choice": _tool_choice(choice)}
            chat["parallel_tool_calls"] = not choice.get("disable_parallel_tool_use", False)
        return read_chat({**fields.unread, **chat}, defaults, max_prompt_len)

    @override
    def whole(self, body: OpenAIBody, answers: Sequence[Answer], head: Head) -> dict[str, Any]:
        answer = answers[0]
        output = Output.of(answer, head)
        return message(answer, head) | {"content": [block(item) for item in output.items], **_end(answer)}

    @override
    def stream(self, body: OpenAIBody, answers: Sequence[Answer], head: Head) -> MessageStream:
        return MessageStream(answers[0], head)


def _response_format(form: Mapping[str, Any]) -> dict[str, Any]:
    """A chat's ``response_format``. Raises RequestError."""
    if form.get("type") != "json_schema":
        raise wrong("output_config.format.type", form.get("type"), "json_schema", "output_config")
    return {"type": "json_schema", "json_schema": {"name": "output", "schema": form.get("schema")}}


class MessageStream(Stream):
    """Named events: the message, blocks that begin, grow and end, and its end."""

    def __init__(self, answer: Answer, head: Head) -> None:
        self._answer, self._head, self._output = answer, head, Output(head)
        self._open: OutputItem | None = None

    @override
    def begin(self) -> Iterator[str]:
        yield named_event("message_start", message=message(self._answer, self._head))

    @override
    def add(self, number: int, answer: Answer, delta: Delta) -> Iterator[str]:
        for item, text, _ in self._output.add(answer, delta._replace(scores=())):
            yield from self._switch_to(item)
            if text:
                kind, name = _DELTAS[item.kind]
                yield named_event("content_block_delta", index=item.index, delta={"type": kind, name: text})

    @override
    def fail(self, error: Mapping[str, Any]) -> Iterator[str]:
        yield named_event("error", **error_body(error))

    @override
    def end(self) -> Iterator[str]:
        yield from self._switch_to(None)
        ended = _end(self._answer)
        counts = ended.pop("usage")
        yield named_event("message_delta", delta=ended, usage=counts)
        yield named_event("message_stop")

    def _switch_to(self, item: OutputItem | None) -> Iterator[str]:
        """End the open block and begin the block of ``item``, unless it is the same."""
        if item is self._open:
            return
        if self._open:
            yield named_event("content_block_stop", index=self._open.index)
        self._open = item
        if item:
            empty = OutputItem(item.kind, item.id, item.index, item.call)
            yield named_event("content_block_start", index=item.index, content_block=block(empty))


_DELTAS = {
    "reasoning": ("thinking_delta", "thinking"),
    "message": ("text_delta", "text"),
    "function_call": ("input_json_delta", "partial_json"),
}
"""The type of a delta and the name of its text, by kind of item."""


def message(answer: Answer, head: Head) -> dict[str, Any]:
    """The message before its first block."""
    return {
        "id": f"msg_{head.identity}",
        "type": "message",
        "role": "assistant",
        "model": head.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": _usage(answer),
    }


def block(item: OutputItem) -> dict[str, Any]:
    """A block of a message's content."""
    if item.call:
        return {"type": "tool_use", "id": item.call.id, "name": item.call.name, "input": _object(item.text)}
    if item.kind == "reasoning":
        return {"type": "thinking", "thinking": item.text, "signature": ""}
    return {"type": "text", "text": item.text}


def error_body(error: Mapping[str, Any]) -> dict[str, Any]:
    """The body of an error in Anthropic's shape. error: in OpenAI's."""
    kind = {"server_error": "api_error"}.get(error["error"]["type"], error["error"]["type"])
    return {"type": "error", "error": {"type": kind, "message": error["error"]["message"]}}


def _object(text: str) -> Any:
    """The arguments of a call; empty where the answer ended within them."""
    try:
        return json.loads(text or "{}")
    except ValueError:
        return {}


def _end(answer: Answer) -> dict[str, Any]:
    reasons = {"stop": "end_turn", "tool_calls": "tool_use"}
    stop_text = answer.ended.stop_text if answer.ended and answer.finish_reason == "stop" else None
    reason = "stop_sequence" if stop_text else reasons.get(answer.finish_reason or "", "max_tokens")
    return {"stop_reason": reason, "stop_sequence": stop_text, "usage": _usage(answer)}


def _usage(answer: Answer) -> dict[str, Any]:
    """Token counts as Anthropic's API has them: ``input_tokens`` without those of the prefix cache."""
    counts = usage([answer], 1)
    cached = counts["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": counts["prompt_tokens"] - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": counts["completion_tokens"],
    }


# ------------------------------------------------------------------------------------------------------- a body


def _positive(name: str, value: Any) -> int:
    return int(arguments.at_least(1).check(name, arguments.whole(name, value)))


def _messages(name: str, value: Any) -> list[dict[str, Any]]:
    """Messages of a chat, in which each result of a tool is a message."""
    if not isinstance(value, list) or not value:
        raise wrong(name, value, "a list of messages")
    messages: list[dict[str, Any]] = []
    for number, entry in enumerate(value):
        where = f"{name}[{number}]"
        role, content = as_object(where, entry).get("role"), entry.get("content")
        if role not in ("user", "assistant"):
            raise wrong(f"{where}.role", role, "user or assistant")
        if not isinstance(content, list):
            messages.append({"role": role, "content": arguments.text(f"{where}.content", content)})
            continue
        blocks = [(f"{where}.content[{index}]", part) for index, part in enumerate(content)]
        messages += _user_turn(blocks) if role == "user" else [_answer(blocks)]
    return messages


_Blocks = Sequence[tuple[str, Any]]
"""Blocks of a message, each with its path in the body."""


def _user_turn(blocks: _Blocks) -> list[dict[str, Any]]:
    results, texts = [], []
    for where, part in blocks:
        if as_object(where, part).get("type") == "tool_result":
            content = _text(f"{where}.content", part.get("content") or "")
            results.append({"role": "tool", "tool_call_id": part.get("tool_use_id"), "content": content})
        else:
            texts.append(_text_of(where, part))
    return [*results, *([{"role": "user", "content": "\n".join(texts)}] if texts or not results else [])]


def _answer(blocks: _Blocks) -> dict[str, Any]:
    texts, thoughts, calls = [], [], []
    for where, part in blocks:
        kind = as_object(where, part).get("type")
        if kind == "tool_use":
            function = {"name": part.get("name"), "arguments": json.dumps(as_object(where, part.get("input")))}
            calls.append({"id": part.get("id"), "type": "function", "function": function})
        elif kind == "thinking":
            thoughts.append(arguments.text(f"{where}.thinking", part.get("thinking")))
        else:
            texts.append(_text_of(where, part))
    answer: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts) if texts or not calls else None}
    answer |= {"tool_calls": calls} if calls else {}
    return answer | ({"reasoning_content": "\n".join(thoughts)} if thoughts else {})


def _text(name: str, value: Any) -> str:
    """A text, or blocks of text."""
    if not isinstance(value, list):
        return arguments.text(name, value)
    return "\n".join(_text_of(f"{name}[{number}]", part) for number, part in enumerate(value))


def _text_of(where: str, part: Any) -> str:
    kind = as_object(where, part).get("type")
    if kind != "text":
        raise wrong(f"{where}.type", kind, "text, tool_use, tool_result or thinking, where these may stand")
    return arguments.text(f"{where}.text", part.get("text"))


def _tools(name: str, value: Any) -> list[dict[str, Any]]:
    """Functions as chats define them. Raises RequestError for tools that run on Anthropic's servers."""
    if not isinstance(value, list):
        raise wrong(name, value, "a list of tools")
    tools = []
    for number, tool in enumerate(value):
        kind = as_object(f"{name}[{number}]", tool).get("type", "custom")
        if kind != "custom":
            raise wrong(f"{name}[{number}].type", kind, "custom, the only type that is supported", name)
        function = {"name": tool.get("name"), "parameters": tool.get("input_schema")}
        more = {key: tool[key] for key in ("description", "strict") if key in tool}
        tools.append({"type": "function", "function": function | more})
    return tools


def _tool_choice(choice: Mapping[str, Any]) -> Any:
    kind = choice.get("type", "auto")
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}
    if kind not in ("auto", "any", "none"):
        raise RequestError(f"tool_choice.type {arguments.show(kind)}: expected auto, any, tool or none", "tool_choice")
    return {"any": "required"}.get(kind, kind)
