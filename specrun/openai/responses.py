"""``/v1/responses``: OpenAI's Responses API for texts. A body is translated to a chat; its answer has another shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from typing_extensions import override

from specrun import arguments
from specrun.errors import RequestError
from specrun.openai.answers import Answer, Delta, TokenScore, chat_logprobs, metrics, usage
from specrun.openai.body import OpenAIBody, read_chat
from specrun.openai.fields import Fields, as_object, wrong
from specrun.openai.output_items import Output, OutputItem
from specrun.openai.prompts import read_messages
from specrun.openai.response_items import (
    Item,
    StoredResponse,
    UnknownResponseError,
    fitting,
    messages_of,
    read_items,
    with_ids,
)
from specrun.openai.shapes import Head, Shape, Stream, named_event
from specrun.sampling.sampler import SamplingParams

_LOGPROBS, _ENCRYPTED = "message.output_text.logprobs", "reasoning.encrypted_content"
_REFUSED: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "prompt": (),
    "n": (1,),
    "prompt_logprobs": (),
}
"""Known fields that are not supported, with their values without effect."""
_NO_CHANGE = ("stream_options", "max_tool_calls", "service_tier", "prompt_cache_key")
"""Fields that are accepted and ignored."""


class ResponseShape(Shape):
    """The shape of one body's answer. It keeps the fields of the body that the answer repeats."""

    def __init__(
        self,
        find: Callable[[str], StoredResponse | None] | None = None,
        keep: Callable[[StoredResponse], bool] | None = None,
        fits: Callable[[OpenAIBody], bool] = lambda _: True,
    ) -> None:
        """find: returns the stored response of an id; None: bodies are only checked.

        keep: stores a response, and returns whether it did. fits: whether the engine has room for a body; it may raise
        ContextLengthError.
        """
        self._find, self._keep, self._fits = find, keep, fits
        self._echoed: dict[str, Any] = {}
        """Fields of the body that the answer repeats."""
        self._with_logprobs = False
        self._items: Sequence[Item] = ()
        """Items that the answer follows."""
        self._referable: dict[str, dict[str, Item]] = {}
        """Items that references may still name, by response and id."""

    @override
    def read(self, body: object, defaults: SamplingParams, max_prompt_len: int | None = None) -> OpenAIBody:
        """Raises RequestError."""
        fields = Fields(as_object("body", body))
        fields.refuse(_REFUSED)
        for name in _NO_CHANGE:
            fields.unread.pop(name, None)
        previous = fields.take("previous_response_id", arguments.text)
        if fields.take("store", arguments.flag) is False:
            self._keep = None
        new_items = fields.required("input", partial(read_items, find=self._find_item))
        items: Sequence[Item] = [*self._conversation(previous), *new_items]
        instructions = fields.take("instructions", arguments.text)
        truncation = fields.take("truncation", _truncation) or "disabled"
        self._echoed = {
            "instructions": instructions,
            "previous_response_id": previous,
            "store": self._keep is not None,
            "truncation": truncation,
        }
        chat = self._read_options(fields)

        def parse(items: Sequence[Item]) -> OpenAIBody:
            messages = [*read_messages("input", messages_of("input", items), max_prompt_len)]
            if instructions is not None:
                messages.insert(0, {"role": "system", "content": instructions})
            return read_chat({**chat, "messages": messages}, defaults, max_prompt_len)

        if truncation == "auto":
            items = fitting(items, lambda part: self._fits(parse(part)))
        parsed = parse(items)
        self._items = items
        self._echoed |= {"temperature": parsed.params.temperature, "top_p": parsed.params.top_p, "user": parsed.user}
        return parsed

    def _read_options(self, fields: Fields) -> dict[str, Any]:
        """A chat's fields except its messages. Raises RequestError."""
        self._with_logprobs = bool(fields.take("include", _include))
        if "top_logprobs" in fields.unread and not self._with_logprobs:
            raise RequestError(f"top_logprobs: needs {_LOGPROBS} in include", "top_logprobs")
        reasoning = fields.take("reasoning", as_object) or {}
        sent_choice = fields.unread.get("tool_choice")
        tools, choice = fields.take("tools", _tools) or [], fields.take("tool_choice", _tool_choice)
        text = fields.take("text", as_object) or {}
        longest = fields.whole("max_output_tokens", 1)
        self._echoed |= {
            "max_output_tokens": longest,
            "metadata": fields.take("metadata", as_object) or {},
            "text": {"format": text.get("format") or {"type": "text"}},
            "top_logprobs": fields.unread.get("top_logprobs", 0),
            "tools": [{"type": "function", **tool["function"]} for tool in tools],
            "tool_choice": sent_choice or "auto",
            "parallel_tool_calls": fields.unread.get("parallel_tool_calls", True),
            "reasoning": {"effort": reasoning.get("effort"), "summary": None},
        }
        return {
            **fields.unread,
            "max_tokens": longest,
            "logprobs": self._with_logprobs,
            "response_format": _response_format(self._echoed["text"]["format"]),
            "reasoning_effort": reasoning.get("effort"),
            "tools": tools,
            "tool_choice": choice if tools else None,
        }

    def _conversation(self, previous: str | None) -> Sequence[Item]:
        """The items up to a response's end. Raises UnknownResponseError."""
        if previous is None or self._find is None:
            return ()
        if (stored := self._find(previous)) is None:
            raise UnknownResponseError(
                f"previous_response_id {arguments.show(previous)}: no such response is stored; "
                "send the whole conversation in input",
                "previous_response_id",
            )
        return stored.conversation

    def _find_item(self, identity: str) -> Item:
        """An item of a stored response, only once: a small body must not name a large item many times.

        Raises RequestError.
        """
        if self._find is None:
            return {"type": "message", "role": "user", "content": ""}
        response_id = f"resp_{identity.partition('_')[2].partition('_')[0]}"
        if response_id not in self._referable:
            stored = self._find(response_id)
            self._referable[response_id] = {item["id"]: item for item in stored.conversation} if stored else {}
        if (item := self._referable[response_id].pop(identity, None)) is None:
            message = (
                f"input: no item {arguments.show(identity)} is stored, or it is in the input; send the item itself"
            )
            raise RequestError(message, "input")
        return item

    @override
    def whole(self, body: OpenAIBody, answers: Sequence[Answer], head: Head) -> dict[str, Any]:
        return self.ended(answers[0], head, Output.of(answers[0], head))

    @override
    def stream(self, body: OpenAIBody, answers: Sequence[Answer], head: Head) -> ResponseStream:
        return ResponseStream(self, answers[0], head)

    def ended(self, answer: Answer, head: Head, output: Output) -> dict[str, Any]:
        """Make and store the response of an answer that has ended."""
        response = self.response(answer, head, output)
        if self._keep:
            response["store"] = self._keep(StoredResponse(response, with_ids(self._items, response["id"])))
        return response

    def response(
        self, answer: Answer, head: Head, output: Output, error: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The response, perhaps incomplete."""
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
            "usage": _usage(answer) if answer.ended else None,
            **metrics([answer]),
            **self._echoed,
        }

    def status(self, answer: Answer) -> str:
        """The API's status of the answer."""
        if not answer.ended:
            return "in_progress"
        return "completed" if answer.finish_reason in ("stop", "tool_calls") else "incomplete"

    def shown(self, item: OutputItem, answer: Answer, status: str | None = None) -> dict[str, Any]:
        """An item of the output. status: of the item; None: that of the answer."""
        status = status or self.status(answer)
        if item.call:
            call = {"call_id": item.call.id, "name": item.call.name, "arguments": item.text}
            return {"id": item.id, "type": "function_call", "status": status, **call}
        content = [] if status == "in_progress" else [self.part(item, answer)]
        if item.kind == "reasoning":
            return {"id": item.id, "type": "reasoning", "summary": [], "content": content, "encrypted_content": None}
        return {"id": item.id, "type": "message", "role": "assistant", "status": status, "content": content}

    def part(self, item: OutputItem, answer: Answer) -> dict[str, Any]:
        """The only content part of a message or a thought."""
        if item.kind == "reasoning":
            return {"type": "reasoning_text", "text": item.text}
        scores = self.logprobs(answer, item.scores)
        return {"type": "output_text", "text": item.text, "annotations": [], "logprobs": scores}

    def logprobs(self, answer: Answer, scores: Sequence[TokenScore]) -> list[dict[str, Any]]:
        """Log-probabilities of tokens; empty where the body does not include them."""
        if not (self._with_logprobs and answer.names):
            return []
        shown: list[dict[str, Any]] = chat_logprobs(Delta("", scores, 0), answer.names)["content"]
        return shown


class ResponseStream(Stream):
    """Named and numbered events. The last one has the whole response."""

    def __init__(self, shape: ResponseShape, answer: Answer, head: Head) -> None:
        self._shape, self._answer, self._head = shape, answer, head
        self._number = 0
        self._output = Output(head)
        self._open: OutputItem | None = None
        """Item of the latest events."""

    @override
    def begin(self) -> Iterator[str]:
        for name in ("created", "in_progress"):
            yield self._event(f"response.{name}", response=self._response())

    @override
    def add(self, number: int, answer: Answer, delta: Delta) -> Iterator[str]:
        for item, text, scores in self._output.add(answer, delta):
            yield from self._switch_to(item)
            if item.kind == "message":
                shown = self._shape.logprobs(answer, scores)
                yield self._event("response.output_text.delta", **_indices(item), delta=text, logprobs=shown)
            elif item.kind == "reasoning":
                yield self._event("response.reasoning_text.delta", **_indices(item), delta=text)
            elif text:
                yield self._event(
                    "response.function_call_arguments.delta", item_id=item.id, output_index=item.index, delta=text
                )

    @override
    def fail(self, error: Mapping[str, Any]) -> Iterator[str]:
        reason = {"code": error["error"]["code"] or "server_error", "message": error["error"]["message"]}
        yield self._event("response.failed", response=self._response(reason))

    @override
    def end(self) -> Iterator[str]:
        if not self._output.items:
            yield from self._switch_to(self._output.begin("message"))
        yield from self._switch_to(None)
        response = self._shape.ended(self._answer, self._head, self._output)
        yield self._event(f"response.{response['status']}", response=response)

    def _switch_to(self, item: OutputItem | None) -> Iterator[str]:
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
            empty = OutputItem(item.kind, item.id, item.index)
            part = self._shape.part(empty, self._answer)
            yield self._event("response.content_part.added", **_indices(item), part=part)

    def _done(self, item: OutputItem, status: str) -> Iterator[str]:
        if item.call:
            call = {"item_id": item.id, "output_index": item.index, "name": item.call.name, "arguments": item.text}
            yield self._event("response.function_call_arguments.done", **call)
        else:
            part = self._shape.part(item, self._answer)
            if item.kind == "message":
                texts = {"text": part["text"], "logprobs": part["logprobs"]}
                yield self._event("response.output_text.done", **_indices(item), **texts)
            else:
                yield self._event("response.reasoning_text.done", **_indices(item), text=part["text"])
            yield self._event("response.content_part.done", **_indices(item), part=part)
        shown = self._shape.shown(item, self._answer, status)
        yield self._event("response.output_item.done", output_index=item.index, item=shown)

    def _response(self, error: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return self._shape.response(self._answer, self._head, self._output, error)

    def _event(self, kind: str, **fields: Any) -> str:
        event = named_event(kind, sequence_number=self._number, **fields)
        self._number += 1
        return event


def _indices(item: OutputItem) -> dict[str, Any]:
    return {"item_id": item.id, "output_index": item.index, "content_index": 0}


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
    """A ``tool_choice`` as chats have it, where an object ``function`` has the name."""
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


def _include(name: str, value: Any) -> bool:
    """Whether to include log-probabilities. Thoughts need no encryption: their texts are in the items."""
    if not isinstance(value, list):
        raise wrong(name, value, "a list")
    for included in value:
        if included not in (_LOGPROBS, _ENCRYPTED):
            raise wrong(name, included, f"{_LOGPROBS} or {_ENCRYPTED}")
    return _LOGPROBS in value


def _truncation(name: str, value: Any) -> str:
    if value not in ("auto", "disabled"):
        raise wrong(name, value, "auto or disabled")
    return str(value)


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
