"""The server's log: lines of JSON on standard error."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from typing_extensions import override

MAX_SHOWN = 200
"""Number of characters of a stranger's text."""
log = logging.getLogger("specrun.serve")


def set_up() -> None:
    """Let this process write what it logs as lines of JSON."""
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonFormatter())
    logging.basicConfig(handlers=[handler], level=logging.INFO)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def shown(text: str) -> str:
    """What the log tells of a text that a client wrote: its beginning."""
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}.."


def write(event: str, fields: Mapping[str, Any]) -> None:
    """One line."""
    log.info(event, extra={"fields": dict(fields)})


class _JsonFormatter(logging.Formatter):
    @override
    def format(self, record: logging.LogRecord) -> str:
        """``time``, ``level``, ``event``, and the fields of the event."""
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": when, "level": record.levelname.lower(), "event": record.getMessage()}
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        text = json.dumps(line, ensure_ascii=False, default=repr)
        # What a terminal obeys instead of showing it, and what other programs take for the end of a line.
        return text if text.isprintable() else "".join(map(_escaped, text))


def _escaped(character: str) -> str:
    return character if character.isprintable() else json.dumps(character)[1:-1]
