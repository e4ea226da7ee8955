"""Answers in the form of OpenAI's completions and chat completions: pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from specrun.request import FinishReason, Request

_REASONS: dict[FinishReason | None, str] = {"stop": "stop", "length": "length", "timeout": "length"}
"""OpenAI has no word for a text that ended because its time was over."""


def completion(requests: Sequence[Request], n: int, identity: str, created: int, model: str) -> dict[str, Any]:
    """The answer to prompts with ``n`` requests each, in order, that have ended and have a text.

    created: seconds since 1970.
    """
    choices = [
        {"index": index, "text": request.text, "logprobs": None, "finish_reason": _REASONS[request.finish_reason]}
        for index, request in enumerate(requests)
    ]
    return _answer("text_completion", f"cmpl-{identity}", created, model, choices, requests, n)


def chat_completion(requests: Sequence[Request], n: int, identity: str, created: int, model: str) -> dict[str, Any]:
    """The answer to one conversation. Arguments as in ``completion``."""
    choices = [
        {
            "index": index,
            "message": {"role": "assistant", "content": request.text, "refusal": None},
            "logprobs": None,
            "finish_reason": _REASONS[request.finish_reason],
        }
        for index, request in enumerate(requests)
    ]
    return _answer("chat.completion", f"chatcmpl-{identity}", created, model, choices, requests, n)


def _answer(
    kind: str, name: str, created: int, model: str, choices: list[dict[str, Any]], requests: Sequence[Request], n: int
) -> dict[str, Any]:
    """usage counts a prompt once, however many answers it has."""
    prompt = sum(len(request.prompt) for request in requests[::n])
    output = sum(len(request.token_outputs) for request in requests)
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": sum(request.stats.cached for request in requests[::n])},
    }
    return {"id": name, "object": kind, "created": created, "model": model, "choices": choices, "usage": usage}


def error_body(message: str, param: str | None = None, kind: str = "invalid_request_error") -> dict[str, Any]:
    """The body of an error."""
    return {"error": {"message": message, "type": kind, "param": param, "code": None}}
