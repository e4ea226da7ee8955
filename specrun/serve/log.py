"""The server's log: lines of JSON on standard error."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

log = logging.getLogger("specrun.serve")


def set_up() -> None:
    """Let this process write what it logs as lines of JSON."""
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonFormatter())
    logging.basicConfig(handlers=[handler], level=logging.INFO)
    logging.getLogger("uvicorn").setLevel(logging.WARNING)


def write(event: str, fields: Mapping[str, Any]) -> None:
    """One line."""
    log.info(event, extra={"fields": dict(fields)})


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """``time``, ``level``, ``event``, and the fields of the event."""
        when = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": when, "level": record.levelname.lower(), "event": record.getMessage()}
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=repr)
