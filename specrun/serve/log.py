"""The server's log: lines of JSON on standard error."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from typing_extensions import override

MAX_SHOWN = 200
"""Maximum number of characters of a client's text."""
log = logging.getLogger("specrun.serve")


def set_up() -> None:
    """Set up this process's log as lines of JSON."""
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonFormatter())
    logging.basicConfig(handlers=[handler], level=logging.INFO)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def shown(text: str) -> str:
    """The beginning of a client's text, for the log."""
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}.."


def write(event: str, fields: Mapping[str, Any]) -> None:
    """Log an event with its fields."""
    log.info(event, extra={"fields": dict(fields)})


class _JsonFormatter(logging.Formatter):
    @override
    def format(self, record: logging.LogRecord) -> str:
        """``time``, ``level``, ``event``, and the fields of the event."""
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": time, "level": record.levelname.lower(), "event": record.getMessage()}
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        text = json.dumps(line, ensure_ascii=False, default=repr)
        # Control characters, which terminals obey, and line ends of other programs are escaped.
        return text if text.isprintable() else "".join(map(_escaped, text))


def _escaped(character: str) -> str:
    return character if character.isprintable() else json.dumps(character)[1:-1]
