"""Conversations and texts in files of JSON lines, in common formats."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrun.errors import BuildConfigError

_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant", "chatgpt": "assistant", "model": "assistant"}
"""ShareGPT's names of roles."""
FORMS = "'messages' (role, content), 'conversations' (from, value) or 'text'"


@dataclass(frozen=True)
class Example:
    """A line of a file: a conversation, or a plain text."""

    where: str
    """The file and the line, for messages."""
    messages: tuple[Mapping[str, Any], ...] = ()
    """Messages in the form of OpenAI's API."""
    text: str | None = None
    tools: tuple[Mapping[str, Any], ...] | None = None


def read_examples(path: Path, option: str) -> Iterator[Example]:
    """The lines of a file. option: what it was given with. Raises BuildConfigError, naming the line."""
    for where, line in _read_lines(path, option):
        content = _object(line, where)
        if isinstance(text := content.get("text"), str):
            yield Example(where, text=text)
            continue
        messages = _messages(content, where)
        if not any(message["role"] == "assistant" for message in messages):
            raise BuildConfigError(f"{where}: no assistant turn, so there is nothing to learn; remove the line")
        tools = content.get("tools") or []
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise BuildConfigError(f"{where}: tools: expected a list, as OpenAI's API has it")
        yield Example(where, messages, tools=tuple(tools) or None)


def read_prompt(line: str, where: str, is_json: bool) -> Example:
    """A prompt: a conversation up to the user's last turn, or a text to be continued.

    is_json: the line has ``prompt`` (a user's turn), ``messages``, ``conversations`` or ``text``. Otherwise it is a
    user's turn itself. Raises BuildConfigError.
    """
    content = _object(line, where) if is_json else {"prompt": line.strip()}
    if content.get("tools"):
        raise BuildConfigError(f"{where}: tools: their calls are not answered here; remove them, or the line")
    if isinstance(text := content.get("text"), str):
        return Example(where, text=text)
    if isinstance(prompt := content.get("prompt"), str):
        return Example(where, ({"role": "user", "content": prompt},))
    messages = _messages(content, where)
    users = [index for index, message in enumerate(messages) if message["role"] == "user"]
    if not users:
        raise BuildConfigError(f"{where}: no user's turn to answer; remove the line")
    return Example(where, messages[: users[-1] + 1])


def _messages(content: Mapping[str, Any], where: str) -> tuple[Mapping[str, Any], ...]:
    """Raises BuildConfigError."""
    turns = content.get("messages", content.get("conversations"))
    if not isinstance(turns, list) or not turns:
        raise BuildConfigError(f"{where}: expected {FORMS}")
    messages = []
    for number, turn in enumerate(turns, 1):
        if isinstance(turn, dict) and "from" in turn:
            role = turn["from"]
            turn = {"role": _ROLES.get(role, role) if isinstance(role, str) else role, "content": turn.get("value")}
        if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
            raise BuildConfigError(f"{where}: message {number} has no role; expected {FORMS}")
        if not isinstance(turn.get("content"), str | list) and not turn.get("tool_calls"):
            raise BuildConfigError(f"{where}: message {number} has no content")
        messages.append(turn)
    return tuple(messages)


def _object(line: str, where: str) -> dict[str, Any]:
    """Raises BuildConfigError."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise BuildConfigError(f"{where}: not readable JSON ({error})") from error
    if not isinstance(content, dict):
        raise BuildConfigError(f"{where}: expected a JSON object with {FORMS}")
    return content


def _read_lines(path: Path, option: str) -> Iterator[tuple[str, str]]:
    """Lines that are not blank. Raises BuildConfigError where there is none, or the file cannot be read as UTF-8."""
    has_any = False
    try:
        with path.open(encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    has_any = True
                    yield f"{option} {path}: line {number}", line
    except (OSError, UnicodeDecodeError) as error:
        raise BuildConfigError(f"{option} {path}: cannot be read as UTF-8 text ({error})") from error
    if not has_any:
        raise BuildConfigError(f"{option} {path}: is empty; expected a JSON object a line")
