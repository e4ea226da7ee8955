"""``/v1/responses``: OpenAI's Responses API for texts. A body becomes one of a chat; its answer has another shape.

Nothing is stored, so every body brings its whole conversation.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from typing_extensions import override

from specrun import arguments
from specrun.errors import RequestError
from specrun.openai.answers import Answer, Delta, TokenScore, ToolCall, chat_logprobs, metrics, usage
from specrun.openai.body import OpenAIBody, read_chat
from specrun.openai.fields import Fields, as_object, wrong
from specrun.openai.prompts import read_messages
from specrun.openai.shapes import Head, Shape, Stream
from specrun.sampling.sampler import SamplingParams
from specrun.text.tool_call_parser import CallDelta

_LOGPROBS, _ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
_STORED = "no response is stored here; send the whole conversation in input"
_REFUSED: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "prompt": (),
    "truncation": ("disabled",),
    "n": (1,),
    "prompt_logprobs": (),
}
"""Known fields that are not supported, with the values that ask for nothing."""
_NO_CHANGE = ("store", "stream_options", "max_tool_calls", "service_tier", "prompt_cache_key")
"""Fields that are taken and change nothing here."""


class ResponseShape(Shape):
    """The shape of one body's answer; it remembers what the answer repeats."""

    def __init__(self) -> None:
        self._told: dict[str, Any] = {}
        self._with_logprobs = False

    @override
    def read(self, body: object, defaults: SamplingParams, max_prompt_len: int | None = None) -> OpenAIBody:
        """Raises RequestError."""
        fields = Fields(as_object("body", body))
        for name in ("previous_response_id", "conversation"):
            if name in fields.left:
                raise RequestError(f"{name}: {_STORED}", name)
        fields.refuse(_REFUSED)
        for name in _NO_CHANGE:
            fields.left.pop(name, None)
        items = fields.required("input", _items)
        messages = [*read_messages("input", items, max_prompt_len)]
        instructions = fields.take("instructions", arguments.text)
        if instructions is not None:
            messages.insert(0, {"role": "system", "content": instructions})
        self._with_logprobs = bool(fields.take("include", _include))
        if "top_logprobs" in fields.left and not self._with_logprobs:
            raise RequestError(f"top_logprobs: needs {_LOGPROBS} in include", "top_logprobs")
        reasoning = fields.take("reasoning", as_object) or {}
        told_choice = fields.left.get("tool_choice")
        tools, choice = fields.take("tools", _tools) or [], fields.take("tool_choice", _tool_choice)
        text = fields.take("text", as_object) or {}
        longest = fields.whole("max_output_tokens", 1)
        self._told = {
            "instructions": instructions,
            "max_output_tokens": longest,
            "metadata": fields.take("metadata", as_object) or {},
            "text": {"format": text.get("format") or {"type": "text"}},
            "top_logprobs": fields.left.get("top_logprobs", 0),
            "tools": [{"type": "function", **tool["function"]} for tool in tools],
            "tool_choice": told_choice or "auto",
            "parallel_tool_calls": fields.left.get("parallel_tool_calls", True),
            "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        }
        chat: dict[str, Any] = {
            **fields.left,
            "messages": messages,
            "max_tokens": longest,
            "logprobs": self._with_logprobs,
            "response_format": _response_format(self._told["text"]["format"]),
            "reasoning_effort": reasoning.get("effort"),
            "tools": tools,
            "tool_choice": choice if tools else None,
        }
        body = read_chat(chat, defaults, max_prompt_len)
        self._told |= {"temperature": body.params.temperature, "top_p": body.params.top_p, "user": body.user}
        return body

    @override
    def whole(self, body: OpenAIBody, answers: Sequence[Answer], head: Head) -> dict[str, Any]:
        return self.response(answers[0], head, Output.of(answers[0], head))

    @override
    def stream(self, body: OpenAIBody, answers: Sequence[Answer], head: Head) -> ResponseStream:
        return ResponseStream(self, answers[0], head)

    def response(
        self, answer: Answer, head: Head, output: Output, error: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The response, as far as it has come."""
        status = "failed" if error else self.status(answer)
        if answer.ended and not output.items:
            output.begin("message")
        return {
            "id": f"resp_{head.identity}",
            "object": "response",
            "created_at": head.created,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": head.model,
            "output": [self.shown(item, answer) for item in output.items] if answer.ended and not error else [],
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": _usage(answer) if answer.ended else None,
            **metrics([answer]),
            **self._told,
        }

    def status(self, answer: Answer) -> str:
        """How far the answer has come."""
        if not answer.ended:
            return "in_progress"
        return "completed" if answer.finish_reason in ("stop", "tool_calls") else "incomplete"

    def shown(self, item: Item, answer: Answer, status: str | None = None) -> dict[str, Any]:
        """An item of the output. status: its own; None: the answer's."""
        status = status or self.status(answer)
        if item.call:
            call = {"call_id": item.call.id, "name": item.call.name, "arguments": item.text}
            return {"id": item.id, "type": "function_call", "status": status, **call}
        content = [] if status == "in_progress" else [self.part(item, answer)]
        if item.kind == "reasoning":
            return {"id": item.id, "type": "reasoning", "summary": [], "content": content, "encrypted_content": None}
        return {"id": item.id, "type": "message", "role": "assistant", "status": status, "content": content}

    def part(self, item: Item, answer: Answer) -> dict[str, Any]:
        """The text of a message or a thought, its one part."""
        if item.kind == "reasoning":
            return {"type": "reasoning_text", "text": item.text}
        scores = self.logprobs(answer, Delta("", item.scores, 0))
        return {"type": "output_text", "text": item.text, "annotations": [], "logprobs": scores}

    def logprobs(self, answer: Answer, delta: Delta) -> list[dict[str, Any]]:
        """Log-probabilities of the tokens of ``delta``; none where none were asked for."""
        if not (self._with_logprobs and answer.names):
            return []
        scores: list[dict[str, Any]] = chat_logprobs(delta, answer.names)["content"]
        return scores


@dataclass
class Item:
    """One item of a response's output."""

    kind: Literal["reasoning", "message", "function_call"]
    id: str
    index: int
    """The item's number in the output, from 0."""
    call: ToolCall | None = None
    text: str = ""
    """Text of a thought or a message; JSON text of a call's arguments."""
    scores: list[TokenScore] = field(default_factory=list)


class Output:
    """The items of an output, in the order in which they begin."""

    def __init__(self, head: Head) -> None:
        self.items: list[Item] = []
        self._identity = head.identity

    @classmethod
    def of(cls, answer: Answer, head: Head) -> Output:
        """The output of an answer that has ended: its thought, its text and its calls."""
        output = cls(head)
        calls = [CallDelta(number, call.name, call.arguments) for number, call in enumerate(answer.calls)]
        output.add(answer, answer.whole._replace(calls=calls))
        return output

    def begin(self, kind: Literal["reasoning", "message", "function_call"], call: ToolCall | None = None) -> Item:
        """A new item."""
        number = len(self.items)
        prefix = {"reasoning": "rs", "message": "msg", "function_call": "fc"}[kind]
        self.items.append(Item(kind, f"{prefix}_{self._identity}{f'_{number}' if number else ''}", number, call))
        return self.items[-1]

    def add(self, answer: Answer, delta: Delta) -> list[tuple[Item, str, Sequence[TokenScore]]]:
        """Add what is new of the answer. Returns the items that grow, with what is new of each."""
        grown: list[tuple[Item, str, Sequence[TokenScore]]] = []
        if delta.reasoning:
            grown.append((self._last("reasoning"), delta.reasoning, ()))
        if delta.text or (delta.scores and not delta.reasoning and not delta.calls):
            grown.append((self._last("message"), delta.text, delta.scores))
        for new in delta.calls:
            item = self.begin("function_call", answer.calls[new.index]) if new.name is not None else self.items[-1]
            grown.append((item, new.arguments, ()))
        for item, text, scores in grown:
            item.text += text
            item.scores += scores
        return grown

    def _last(self, kind: Literal["reasoning", "message"]) -> Item:
        """The last item, or a new one where that is of another kind."""
        return self.items[-1] if self.items and self.items[-1].kind == kind else self.begin(kind)


class ResponseStream(Stream):
    """Named events with numbers, of which the last has the whole response."""

    def __init__(self, shape: ResponseShape, answer: Answer, head: Head) -> None:
        self._shape, self._answer, self._head = shape, answer, head
        self._number = 0
        self._output = Output(head)
        self._open: Item | None = None
        """The item that events are about."""

    @override
    def begin(self) -> Iterator[str]:
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._response())

    @override
    def add(self, number: int, answer: Answer, delta: Delta) -> Iterator[str]:
        for item, text, scores in self._output.add(answer, delta):
            yield from self._turn_to(item)
            if item.kind == "message":
                shown = self._shape.logprobs(answer, Delta("", scores, 0))
                yield self._event("response.output_text.delta", **_place(item), delta=text, logprobs=shown)
            elif item.kind == "reasoning":
                yield self._event("response.reasoning_text.delta", **_place(item), delta=text)
            elif text:
                yield self._event(
                    "response.function_call_arguments.delta", item_id=item.id, output_index=item.index, delta=text
                )

    @override
    def fail(self, error: Mapping[str, Any]) -> Iterator[str]:
        told = {"code": error["error"]["code"] or "server_error", "message": error["error"]["message"]}
        yield self._event("response.failed", response=self._response(told))

    @override
    def end(self) -> Iterator[str]:
        if not self._output.items:
            yield from self._turn_to(self._output.begin("message"))
        yield from self._turn_to(None)
        response = self._response()
        yield self._event(f"response.{response['status']}", response=response)

    def _turn_to(self, item: Item | None) -> Iterator[str]:
        """End the open item, and begin ``item``, unless it is the same."""
        if item is self._open:
            return
        if self._open:
            yield from self._done(self._open, "completed" if item else self._shape.status(self._answer))
        self._open = item
        if item is None:
            return
        shown = self._shape.shown(item, self._answer, "in_progress")
        if item.call:
            shown["arguments"] = ""
        yield self._event("response.output_item.added", output_index=item.index, item=shown)
        if not item.call:
            empty = Item(item.kind, item.id, item.index)
            part = self._shape.part(empty, self._answer)
            yield self._event("response.content_part.added", **_place(item), part=part)

    def _done(self, item: Item, status: str) -> Iterator[str]:
        if item.call:
            told = {"item_id": item.id, "output_index": item.index, "name": item.call.name, "arguments": item.text}
            yield self._event("response.function_call_arguments.done", **told)
        else:
            part = self._shape.part(item, self._answer)
            if item.kind == "message":
                texts = {"text": part["text"], "logprobs": part["logprobs"]}
                yield self._event("response.output_text.done", **_place(item), **texts)
            else:
                yield self._event("response.reasoning_text.done", **_place(item), text=part["text"])
            yield self._event("response.content_part.done", **_place(item), part=part)
        shown = self._shape.shown(item, self._answer, status)
        yield self._event("response.output_item.done", output_index=item.index, item=shown)

    def _response(self, error: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return self._shape.response(self._answer, self._head, self._output, error)

    def _event(self, kind: str, **fields: Any) -> str:
        data = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return f"event: {kind}\ndata: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"


def _place(item: Item) -> dict[str, Any]:
    return {"item_id": item.id, "output_index": item.index, "content_index": 0}


def _items(name: str, value: Any) -> list[Any]:
    """Messages of a chat. Raises RequestError for items that have no place there."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise wrong(name, value, "a text or a list of items")
    messages: list[dict[str, Any]] = []
    thought = None
    for number, item in enumerate(value):
        where = f"{name}[{number}]"
        kind = as_object(where, item).get("type", "message")
        if kind == "reasoning":
            thought = _thought(f"{where}.content", item.get("content"))
            continue
        if kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
        else:
            messages.append(_message(where, kind, item))
        if thought and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = thought
        thought = None
    return messages


def _message(where: str, kind: Any, item: Mapping[str, Any]) -> dict[str, Any]:
    if kind not in ("message", "function_call_output"):
        raise wrong(f"{where}.type", kind, "message, function_call, function_call_output or reasoning")
    content = item.get("output" if kind == "function_call_output" else "content")
    if isinstance(content, list):
        content = [_part(part) for part in content]
    if kind == "message":
        return {"role": item.get("role"), "content": content}
    return {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}


def _thought(where: str, content: Any) -> str:
    """The text of a thought that an earlier answer began with."""
    if not isinstance(content, list):
        return ""
    return "".join(arguments.text(where, as_object(where, part).get("text")) for part in content)


def _tools(name: str, value: Any) -> list[dict[str, Any]]:
    """Functions as chats define them. Raises RequestError for tools of other kinds."""
    if not isinstance(value, list):
        raise wrong(name, value, "a list of functions")
    tools = []
    for number, tool in enumerate(value):
        kind = as_object(f"{name}[{number}]", tool).get("type")
        if kind != "function":
            raise wrong(f"{name}[{number}].type", kind, "function, the only type that is supported", name)
        tools.append({"type": "function", "function": {key: item for key, item in tool.items() if key != "type"}})
    return tools


def _tool_choice(name: str, value: Any) -> Any:
    """A ``tool_choice`` as chats have it, where functions have their names in an object of their own."""
    if not isinstance(value, Mapping):
        return value
    if value.get("type") == "allowed_tools":
        tools = value.get("tools")
        tools = [_named_function(tool) for tool in tools] if isinstance(tools, list) else tools
        return {"type": "allowed_tools", "allowed_tools": {"mode": value.get("mode"), "tools": tools}}
    return _named_function(value)


def _named_function(value: Any) -> Any:
    is_function = isinstance(value, Mapping) and value.get("type") == "function"
    return {"type": "function", "function": {"name": value.get("name")}} if is_function else value


def _part(part: Any) -> Any:
    """A part of a text as chats have it; others are refused by name there."""
    is_text = isinstance(part, Mapping) and part.get("type") in ("input_text", "output_text")
    return {"type": "text", "text": part.get("text")} if is_text else part


def _include(name: str, value: Any) -> bool:
    """Whether log-probabilities are wanted. Thoughts are not encrypted here: they are in the items."""
    if not isinstance(value, list) or any(one not in (_LOGPROBS, _ENCRYPTED) for one in value):
        raise wrong(name, value, f"nothing but {_LOGPROBS} and {_ENCRYPTED}")
    return _LOGPROBS in value


def _response_format(form: Any) -> dict[str, Any]:
    """A chat's ``response_format``. Raises RequestError."""
    kind = as_object("text.format", form).get("type")
    if kind not in ("text", "json_object", "json_schema"):
        raise wrong("text.format.type", kind, "text, json_object or json_schema", "text")
    return {"type": kind, "json_schema": {"schema": form.get("schema")}} if kind == "json_schema" else {"type": kind}


def _usage(answer: Answer) -> dict[str, Any]:
    totals = usage([answer], 1)
    return {
        "input_tokens": totals["prompt_tokens"],
        "input_tokens_details": totals["prompt_tokens_details"],
        "output_tokens": totals["completion_tokens"],
        "output_tokens_details": totals["completion_tokens_details"],
        "total_tokens": totals["total_tokens"],
    }
