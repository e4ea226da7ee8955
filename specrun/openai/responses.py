"""``/v1/responses``: OpenAI's Responses API for texts. A body becomes one of a chat; its answer has another shape.

Nothing is stored, so every body brings its whole conversation.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from typing_extensions import override

from specrun import arguments
from specrun.errors import RequestError
from specrun.openai.answers import Answer, Delta, chat_logprobs, metrics, usage
from specrun.openai.body import OpenAIBody, read_chat
from specrun.openai.fields import Fields, as_object, wrong
from specrun.openai.prompts import read_messages
from specrun.openai.shapes import Head, Shape, Stream
from specrun.sampling.sampler import SamplingParams

_LOGPROBS = "message.output_text.logprobs"
_STORED = "no response is stored here; send the whole conversation in input"
_REFUSED: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "prompt": (),
    "tools": ([],),
    "tool_choice": ("auto", "none"),
    "truncation": ("disabled",),
    "reasoning": ({},),
    "n": (1,),
    "prompt_logprobs": (),
}
"""Known fields that are not supported, with the values that ask for nothing."""
_NO_CHANGE = ("store", "stream_options", "max_tool_calls", "parallel_tool_calls", "service_tier", "prompt_cache_key")
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
        text = fields.take("text", as_object) or {}
        longest = fields.whole("max_output_tokens", 1)
        self._told = {
            "instructions": instructions,
            "max_output_tokens": longest,
            "metadata": fields.take("metadata", as_object) or {},
            "text": {"format": text.get("format") or {"type": "text"}},
            "top_logprobs": fields.left.get("top_logprobs", 0),
        }
        chat: dict[str, Any] = {
            **fields.left,
            "messages": messages,
            "max_tokens": longest,
            "logprobs": self._with_logprobs,
            "response_format": _response_format(self._told["text"]["format"]),
        }
        body = read_chat(chat, defaults, max_prompt_len)
        self._told |= {"temperature": body.params.temperature, "top_p": body.params.top_p, "user": body.user}
        return body

    @override
    def whole(self, body: OpenAIBody, answers: Sequence[Answer], head: Head) -> dict[str, Any]:
        return self.response(answers[0], head)

    @override
    def stream(self, body: OpenAIBody, answers: Sequence[Answer], head: Head) -> ResponseStream:
        return ResponseStream(self, answers[0], head)

    def response(self, answer: Answer, head: Head, error: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """The response, as far as it has come."""
        status = "failed" if error else "in_progress"
        if answer.ended and not error:
            status = "completed" if answer.finish_reason == "stop" else "incomplete"
        return {
            "id": f"resp_{head.identity}",
            "object": "response",
            "created_at": head.created,
            "status": status,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": head.model,
            "output": [self.item(answer, head)] if answer.ended and not error else [],
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "tool_choice": "auto",
            "tools": [],
            "truncation": "disabled",
            "usage": _usage(answer) if answer.ended else None,
            **metrics([answer]),
            **self._told,
        }

    def item(self, answer: Answer, head: Head) -> dict[str, Any]:
        """The message, the one item of the output."""
        status, content = "in_progress", []
        if answer.ended:
            status = "completed" if answer.finish_reason == "stop" else "incomplete"
            content = [self.part(answer)]
        return {
            "id": f"msg_{head.identity}",
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def part(self, answer: Answer) -> dict[str, Any]:
        """The text, the one part of the message."""
        whole = answer.whole
        return {"type": "output_text", "text": whole.text, "annotations": [], "logprobs": self.logprobs(answer, whole)}

    def logprobs(self, answer: Answer, delta: Delta) -> list[dict[str, Any]]:
        """Log-probabilities of the tokens of ``delta``; none where none were asked for."""
        if not (self._with_logprobs and answer.names):
            return []
        scores: list[dict[str, Any]] = chat_logprobs(delta, answer.names)["content"]
        return scores


class ResponseStream(Stream):
    """Named events with numbers, of which the last has the whole response."""

    def __init__(self, shape: ResponseShape, answer: Answer, head: Head) -> None:
        self._shape, self._answer, self._head = shape, answer, head
        self._number = 0
        self._place = {"item_id": f"msg_{head.identity}", "output_index": 0, "content_index": 0}

    @override
    def begin(self) -> Iterator[str]:
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._shape.response(self._answer, self._head))
        item = self._shape.item(self._answer, self._head)
        yield self._event("response.output_item.added", output_index=0, item=item)
        part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        yield self._event("response.content_part.added", **self._place, part=part)

    @override
    def add(self, number: int, answer: Answer, delta: Delta) -> Iterator[str]:
        if delta.text or delta.scores:
            scores = self._shape.logprobs(answer, delta)
            yield self._event("response.output_text.delta", **self._place, delta=delta.text, logprobs=scores)

    @override
    def fail(self, error: Mapping[str, Any]) -> Iterator[str]:
        told = {"code": error["error"]["code"] or "server_error", "message": error["error"]["message"]}
        yield self._event("response.failed", response=self._shape.response(self._answer, self._head, told))

    @override
    def end(self) -> Iterator[str]:
        part, item = self._shape.part(self._answer), self._shape.item(self._answer, self._head)
        yield self._event("response.output_text.done", **self._place, text=part["text"], logprobs=part["logprobs"])
        yield self._event("response.content_part.done", **self._place, part=part)
        yield self._event("response.output_item.done", output_index=0, item=item)
        response = self._shape.response(self._answer, self._head)
        yield self._event(f"response.{response['status']}", response=response)

    def _event(self, kind: str, **fields: Any) -> str:
        data = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return f"event: {kind}\ndata: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"


def _items(name: str, value: Any) -> list[Any]:
    """Messages of a chat. Raises RequestError for items that are no messages."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise wrong(name, value, "a text or a list of messages")
    return [_message(f"{name}[{number}]", item) for number, item in enumerate(value)]


def _message(where: str, item: Any) -> dict[str, Any]:
    kind = as_object(where, item).get("type", "message")
    if kind != "message":
        raise wrong(f"{where}.type", kind, "message, the only type that is supported")
    content = item.get("content")
    if isinstance(content, list):
        content = [_part(part) for part in content]
    return {"role": item.get("role"), "content": content}


def _part(part: Any) -> Any:
    """A part of a text as chats have it; others are refused by name there."""
    is_text = isinstance(part, Mapping) and part.get("type") in ("input_text", "output_text")
    return {"type": "text", "text": part.get("text")} if is_text else part


def _include(name: str, value: Any) -> bool:
    if not isinstance(value, list) or any(one != _LOGPROBS for one in value):
        raise wrong(name, value, f"nothing but {_LOGPROBS}")
    return bool(value)


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
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": totals["total_tokens"],
    }
