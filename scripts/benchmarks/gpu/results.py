"""The file of what was found. It is written with every value, so that what ran is kept when the machine goes away."""

from __future__ import annotations

import json
import math
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Concatenate, ParamSpec

from specrun.errors import SpecError

Figures = dict[str, Any]
P = ParamSpec("P")


class OutOfTime(Exception):
    """The time that was given is spent."""


class Results:
    """A part of the file, and the parts in it."""

    def __init__(self, figures: Figures, write: Callable[[], None], deadline: float = math.inf) -> None:
        self.figures = figures
        self._write = write
        self._deadline = deadline

    @classmethod
    def in_file(cls, path: Path, seconds: float = math.inf) -> Results:
        """The whole file, with what stands in it already. Work may go on for ``seconds``."""
        figures: Figures = json.loads(path.read_text()) if path.is_file() else {}

        def write() -> None:
            temporary = path.with_name(f".{path.name}.tmp")
            temporary.write_text(json.dumps(figures, indent=2) + "\n")
            temporary.replace(path)

        return cls(figures, write, time.monotonic() + seconds)

    @property
    def seconds_left(self) -> float:
        """Of the time that was given."""
        return self._deadline - time.monotonic()

    def require_time(self) -> None:
        """Raise OutOfTime where none is left."""
        if self.seconds_left <= 0:
            raise OutOfTime

    def put(self, **values: Any) -> None:
        """Add values, and write the file."""
        self.figures.update(values)
        self._write()

    def part(self, *names: object) -> Results:
        """The part of this name, and in it the part of the next; new ones are empty."""
        figures = self.figures
        for name in names:
            figures = figures.setdefault(str(name), {})
        return Results(figures, self._write, self._deadline)

    def attempt(
        self, name: object, work: Callable[Concatenate[Results, P], object], *given: P.args, **named: P.kwargs
    ) -> bool:
        """Let ``work`` fill the part of this name. A failure is a finding too, and the other parts go on.

        Raises OutOfTime: then the parts behind this one do not begin.
        """
        part = self.part(name)
        for old in ("error", "traceback", "stopped"):  # Of an earlier run.
            part.figures.pop(old, None)
        try:
            self.require_time()
            work(part, *given, **named)
        except OutOfTime:
            part.put(stopped="the time that was given is spent")
            raise
        except Exception as error:
            part.put(error=" ".join(str(error).split()) or type(error).__name__)
            if not isinstance(error, SpecError):
                part.put(traceback=traceback.format_exc(limit=-6))
            return False
        self._write()
        return True
