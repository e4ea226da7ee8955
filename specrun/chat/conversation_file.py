"""Conversations in files: a JSON object with ``messages``, as OpenAI's API has them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specrun.engine_dir.directories import write_whole
from specrun.errors import RequestError
from specrun.request.factory import Message


def save(messages: Sequence[Message], path: Path) -> None:
    """Write ``messages``, whole or not at all. Raises RequestError, also where another kind of file is in the way."""
    if path.exists():
        load(path)
    text = json.dumps({"messages": list(messages)}, ensure_ascii=False, indent=1) + "\n"
    try:
        write_whole(path, text.encode(errors="backslashreplace"), mode=0o600)
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror}; nothing was saved") from error


def load(path: Path) -> list[Message]:
    """The messages in a file. Raises RequestError for a file that ``save`` does not write."""
    try:
        content: Any = json.loads(path.read_bytes())
    except OSError as error:
        raise RequestError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise RequestError(f"{path}: no conversation ({error})") from error
    messages = content.get("messages") if isinstance(content, dict) else None
    if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
        raise RequestError(f'{path}: no conversation; expected {{"messages": [{{"role": .., "content": ..}}, ..]}}')
    return messages


def _is_message(message: object) -> bool:
    return isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
