"""Prompts for benchmarks: a set of our own, and files of other benchmarks.

The categories of ours are SPEED-Bench's. Files are JSON lines or a JSON array; an item's prompt is the first turn that
it has under one of the names below, as in MT-Bench, Spec-Bench, SPEED-Bench, HumanEval, GSM8K, MATH-500, ShareGPT and
files of OpenAI's API.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specrun.errors import RequestError
from specrun.request.prompts import read_text

BUILTIN = "builtin"
_OURS = Path(__file__).with_name("prompts.jsonl")
_TEXTS = ("prompt", "text", "question", "instruction", "problem")
_CATEGORIES = ("category", "task", "subject")
_TURNS = ("turns", "messages", "conversations")
_ROLES, _USERS = ("role", "from"), ("user", "human")


class BenchPrompt(NamedTuple):
    """A prompt for a benchmark."""

    prompt: str | Sequence[int]
    """A text, or token ids."""
    category: str = ""
    """Kind of the task; empty if not given."""
    output_len: int | None = None
    """Tokens of its output. None: as many as the others have."""


def read_prompt_set(source: str) -> list[BenchPrompt]:
    """``builtin``, or the prompts of a file. Raises RequestError, with the item's number, for what has no prompt."""
    path = _OURS if source == BUILTIN else Path(source).expanduser()
    text = read_text("--prompts", path, f"; give a file, or {BUILTIN}")
    bench_prompts = []
    for number, item in enumerate(_items(source, text), 1):
        prompt = _prompt(item)
        if not prompt:
            expected = ", ".join((*_TEXTS, *_TURNS))
            raise RequestError(
                f"--prompts {source}: item {number} has no prompt; expected one of the fields {expected}"
            )
        category = next((item[name] for name in _CATEGORIES if item.get(name)), "")
        bench_prompts.append(BenchPrompt(prompt, str(category)))
    if not bench_prompts:
        raise RequestError(f"--prompts {source}: no prompts")
    return bench_prompts


def _items(source: str, text: str) -> Sequence[Any]:
    """A JSON array's items, or those of JSON lines."""
    try:
        if text.lstrip().startswith("["):
            items: list[Any] = json.loads(text)
            return items
        return [json.loads(line) for line in text.splitlines() if line.strip()]
    except (ValueError, RecursionError) as error:
        raise RequestError(f"--prompts {source}: neither JSON lines nor a JSON array: {error}") from error


def _prompt(item: Any) -> str | None:
    """The first turn of a user; None where there is none."""
    if not isinstance(item, dict):
        return None
    for name in _TEXTS:
        if isinstance(text := item.get(name), str) and text.strip():
            return text
    turns: list[Any] = next((item[name] for name in _TURNS if isinstance(item.get(name), list)), [])
    for turn in turns:
        if isinstance(turn, str) and turn.strip():
            return turn
        if isinstance(turn, dict) and next((turn[role] for role in _ROLES if role in turn), "user") in _USERS:
            content = turn.get("content", turn.get("value"))
            if isinstance(content, str) and content.strip():
                return content
    return None
