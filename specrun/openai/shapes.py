"""The two kinds of answers: completions and chat completions, whole and in chunks."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from typing_extensions import override

from specrun.openai.answers import (
    Answer,
    Delta,
    ToolCall,
    chat_logprobs,
    completion_logprobs,
    metrics,
    prompt_logprobs,
    speculation,
    usage,
)
from specrun.openai.body import OpenAIBody, read_chat, read_completion
from specrun.sampling.sampler import SamplingParams


class Head(NamedTuple):
    """The first fields of every answer."""

    identity: str
    """Last part of ``id``, after the prefix."""
    created: int
    """Time in seconds since 1970."""
    model: str


def named_event(kind: str, **fields: Any) -> str:
    """A server-sent event with a name, which is also its field ``type``."""
    data = {"type": kind, **fields}
    return f"event: {kind}\ndata: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"


class Stream(Protocol):
    """An answer as server-sent events, each with its line ends."""

    def begin(self) -> Iterable[str]:
        """Events before the first token."""

    def add(self, number: int, answer: Answer, delta: Delta) -> Iterable[str]:
        """Events of what an update adds to an answer."""

    def fail(self, error: Mapping[str, Any]) -> Iterable[str]:
        """Last events where a request has failed. error: the body of an error."""

    def end(self) -> Iterable[str]:
        """Last events where all requests have ended."""


class Shape(Protocol):
    """Reads and answers the bodies of one path."""

    def read(self, body: object, defaults: SamplingParams, max_prompt_len: int | None = None) -> OpenAIBody:
        """Check and translate a body.

        defaults: values of missing sampling fields. max_prompt_len: maximum tokens of a prompt; None: any number.
        Raises RequestError.
        """

    def whole(self, body: OpenAIBody, answers: Sequence[Answer], head: Head) -> dict[str, Any]:
        """The answer in one piece. The n answers of a prompt come one after the other."""

    def stream(self, body: OpenAIBody, answers: Sequence[Answer], head: Head) -> Stream:
        """The answer in events."""


class ChoiceShape(Shape, Protocol):
    """A shape whose answers are lists of choices, in one piece and in chunks."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    @override
    def whole(self, body: OpenAIBody, answers: Sequence[Answer], head: Head) -> dict[str, Any]:
        return whole_answer(self, answers, body.n, head)

    @override
    def stream(self, body: OpenAIBody, answers: Sequence[Answer], head: Head) -> Stream:
        return ChunkStream(self, body, answers, head)

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        """A whole choice."""

    def openings(self, index: int) -> list[dict[str, Any]]:
        """Chunks of a choice before its first token."""

    def chunks(self, index: int, answer: Answer, delta: Delta) -> list[dict[str, Any]]:
        """Chunks of what an update adds to a choice."""

    def more(self, answers: Sequence[Answer]) -> dict[str, Any]:
        """Fields of a whole answer except its choices."""


def whole_answer(shape: ChoiceShape, answers: Sequence[Answer], n: int, head: Head) -> dict[str, Any]:
    """The answer to a body in one piece. The n answers of a prompt come one after the other."""
    return {
        "id": f"{shape.id_prefix}-{head.identity}",
        "object": shape.whole_object,
        "created": head.created,
        "model": head.model,
        "choices": [shape.choice(index, answer) for index, answer in enumerate(answers)],
        "usage": usage(answers, n),
        "speculation": speculation(answers),
        **metrics(answers),
        **shape.more(answers),
    }


class ChunkStream(Stream):
    """Chunks of choices, and ``[DONE]``."""

    def __init__(self, shape: ChoiceShape, body: OpenAIBody, answers: Sequence[Answer], head: Head) -> None:
        self._shape, self._body, self._answers, self._head = shape, body, answers, head

    @override
    def begin(self) -> Iterator[str]:
        for index in range(len(self._answers)):
            for choice in self._shape.openings(index):
                yield self._chunk([choice])

    @override
    def add(self, number: int, answer: Answer, delta: Delta) -> Iterator[str]:
        for choice in self._shape.chunks(number, answer, delta):
            yield self._chunk([choice])

    @override
    def fail(self, error: Mapping[str, Any]) -> Iterator[str]:
        """An error is the last chunk."""
        yield f"data: {json.dumps(error)}\n\n"

    @override
    def end(self) -> Iterator[str]:
        if self._body.include_usage:
            more = {"usage": usage(self._answers, self._body.n), "speculation": speculation(self._answers)}
            yield self._chunk([], {**more, **metrics(self._answers)})
        yield "data: [DONE]\n\n"

    def _chunk(self, choices: list[dict[str, Any]], more: dict[str, Any] | None = None) -> str:
        if more is None and self._body.include_usage:
            more = {"usage": usage(self._answers, self._body.n) if self._body.continuous_usage else None}
        chunk = {
            "id": f"{self._shape.id_prefix}-{self._head.identity}",
            "object": self._shape.chunk_object,
            "created": self._head.created,
            "model": self._head.model,
            "choices": choices,
            **(more or {}),
        }
        return f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The body of an error."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class CompletionShape(ChoiceShape):
    """``/v1/completions``."""

    id_prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    @override
    def read(self, body: object, defaults: SamplingParams, max_prompt_len: int | None = None) -> OpenAIBody:
        return read_completion(body, defaults, max_prompt_len)

    @override
    def more(self, answers: Sequence[Answer]) -> dict[str, Any]:
        return {}

    @override
    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        more = {"prompt_logprobs": prompt_logprobs(answer)} if answer.response_options.shows_prompt_logprobs else {}
        return self._choice(index, answer, answer.whole) | more

    @override
    def openings(self, index: int) -> list[dict[str, Any]]:
        return []

    @override
    def chunks(self, index: int, answer: Answer, delta: Delta) -> list[dict[str, Any]]:
        return [self._choice(index, answer, delta)] if delta.text or delta.scores or answer.ended else []

    def _choice(self, index: int, answer: Answer, delta: Delta) -> dict[str, Any]:
        logprobs = completion_logprobs(delta, answer.names) if answer.wants_logprobs and answer.names else None
        return {"index": index, "text": delta.text, "logprobs": logprobs, **_end(answer)}


class ChatShape(ChoiceShape):
    """``/v1/chat/completions``."""

    id_prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    @override
    def read(self, body: object, defaults: SamplingParams, max_prompt_len: int | None = None) -> OpenAIBody:
        return read_chat(body, defaults, max_prompt_len)

    @override
    def more(self, answers: Sequence[Answer]) -> dict[str, Any]:
        shows_prompt = answers[0].response_options.shows_prompt_logprobs
        return {"prompt_logprobs": prompt_logprobs(answers[0])} if shows_prompt else {}

    @override
    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        whole = answer.whole.text
        message: dict[str, Any] = {"role": "assistant", "content": whole, "refusal": None}
        if answer.calls:
            message |= {"content": whole or None, "tool_calls": [_call(call, call.arguments) for call in answer.calls]}
        if reasoning := answer.whole.reasoning:
            message["reasoning_content"] = reasoning
        return {"index": index, "message": message, "logprobs": _chat_logprobs(answer, answer.whole), **_end(answer)}

    @override
    def openings(self, index: int) -> list[dict[str, Any]]:
        delta = {"role": "assistant", "content": "", "refusal": None}
        return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]

    @override
    def chunks(self, index: int, answer: Answer, delta: Delta) -> list[dict[str, Any]]:
        deltas: list[dict[str, Any]] = [{"reasoning_content": delta.reasoning}] if delta.reasoning else []
        deltas += [{"content": delta.text}] if delta.text else []
        for part in delta.calls:
            call = answer.calls[part.index]
            shown = {"function": {"arguments": part.arguments}} if part.name is None else _call(call, part.arguments)
            deltas.append({"tool_calls": [{"index": part.index, **shown}]})
        if not deltas and (delta.scores or answer.ended):
            deltas = [{}]
        chunks = [{"index": index, "delta": fields, "logprobs": None, "finish_reason": None} for fields in deltas]
        if chunks:
            chunks[0]["logprobs"] = _chat_logprobs(answer, delta)
            chunks[-1] |= _end(answer)
        return chunks


def _call(call: ToolCall, arguments: str) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _chat_logprobs(answer: Answer, delta: Delta) -> dict[str, Any] | None:
    return chat_logprobs(delta, answer.names) if answer.wants_logprobs and answer.names else None


def _end(answer: Answer) -> dict[str, Any]:
    return {"finish_reason": answer.finish_reason, "stop_reason": answer.stop_reason}
