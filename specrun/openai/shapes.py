"""The two kinds of answers: completions and chat completions, whole and in chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from specrun.openai.answers import Answer, Delta, ToolCall, chat_logprobs, completion_logprobs, speculation, usage
from specrun.openai.body import OpenAIBody, read_chat, read_completion
from specrun.sampling import SamplingParams


class Shape(Protocol):
    """How one kind of bodies is read and answered."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def read(self, body: object, defaults: SamplingParams, max_prompt_len: int | None = None) -> OpenAIBody:
        """See ``specrun.openai.body``."""

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        """A whole choice."""

    def openings(self, index: int) -> list[dict[str, Any]]:
        """Chunks of a choice before its first token."""

    def chunks(self, index: int, answer: Answer, delta: Delta) -> list[dict[str, Any]]:
        """What an update adds to a choice, in any number of chunks."""


def whole_answer(
    shape: Shape, answers: Sequence[Answer], n: int, identity: str, created: int, model: str
) -> dict[str, Any]:
    """The answer to a body in one piece. The n answers of a prompt come one after the other.

    identity: what ``id`` ends with. created: seconds since 1970.
    """
    return {
        "id": f"{shape.id_prefix}-{identity}",
        "object": shape.whole_object,
        "created": created,
        "model": model,
        "choices": [shape.choice(index, answer) for index, answer in enumerate(answers)],
        "usage": usage(answers, n),
        "speculation": speculation(answers),
    }


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The body of an error."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class CompletionShape:
    """``/v1/completions``."""

    id_prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def read(self, body: object, defaults: SamplingParams, max_prompt_len: int | None = None) -> OpenAIBody:
        """See ``Shape``."""
        return read_completion(body, defaults, max_prompt_len)

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        """See ``Shape``."""
        return self._choice(index, answer, answer.whole)

    def openings(self, index: int) -> list[dict[str, Any]]:
        """See ``Shape``."""
        return []

    def chunks(self, index: int, answer: Answer, delta: Delta) -> list[dict[str, Any]]:
        """See ``Shape``."""
        return [self._choice(index, answer, delta)] if delta.text or delta.scores or answer.ended else []

    def _choice(self, index: int, answer: Answer, delta: Delta) -> dict[str, Any]:
        wanted = answer.wants_logprobs and answer.names
        logprobs = completion_logprobs(delta, answer.names) if wanted and answer.names else None
        return {"index": index, "text": delta.text, "logprobs": logprobs, **_end(answer)}


class ChatShape:
    """``/v1/chat/completions``."""

    id_prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def read(self, body: object, defaults: SamplingParams, max_prompt_len: int | None = None) -> OpenAIBody:
        """See ``Shape``."""
        return read_chat(body, defaults, max_prompt_len)

    def choice(self, index: int, answer: Answer) -> dict[str, Any]:
        """See ``Shape``."""
        whole = answer.whole.text
        message: dict[str, Any] = {"role": "assistant", "content": whole, "refusal": None}
        if answer.calls:
            message |= {"content": whole or None, "tool_calls": [_call(one, one.arguments) for one in answer.calls]}
        return {"index": index, "message": message, "logprobs": _chat_logprobs(answer, answer.whole), **_end(answer)}

    def openings(self, index: int) -> list[dict[str, Any]]:
        """See ``Shape``."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]

    def chunks(self, index: int, answer: Answer, delta: Delta) -> list[dict[str, Any]]:
        """See ``Shape``."""
        deltas: list[dict[str, Any]] = [{"content": delta.text}] if delta.text else []
        for new in delta.calls:
            call = answer.calls[new.index]
            shown = {"function": {"arguments": new.arguments}} if new.name is None else _call(call, new.arguments)
            deltas.append({"tool_calls": [{"index": new.index, **shown}]})
        if not deltas and (delta.scores or answer.ended):
            deltas = [{}]
        chunks = [{"index": index, "delta": one, "logprobs": None, "finish_reason": None} for one in deltas]
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
