"""A part of a checkpoint's configuration, read with every value checked, because another tool wrote it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrun.errors import CheckpointError, UnsupportedModelError

_LONGEST_NAME = 500
"""Characters of a module's name or pattern."""
_MOST_NAMES = 200_000
UNQUANTIZED = "give the checkpoint as it was before quantization"


@dataclass(frozen=True)
class Section:
    """A JSON object: ``path`` is its file, ``key`` its place in it, both for error messages."""

    path: Path
    key: str
    values: dict[str, Any]

    def wrong(self, name: str, expected: str) -> CheckpointError:
        """The error for a value that makes no sense."""
        return CheckpointError(
            f"{self.path}: {self.key}.{name} {shown(self.values.get(name))}: expected {expected}; download the file "
            "again"
        )

    def refused(self, name: str, reason: str, instead: str = UNQUANTIZED) -> UnsupportedModelError:
        """The error for a value that is sound but cannot be read."""
        value = shown(self.values.get(name))
        return UnsupportedModelError(f"{self.path}: {self.key}.{name} {value}: {reason}; {instead}")

    def get(self, name: str) -> Any:
        """The value as it stands; None where there is none."""
        return self.values.get(name)

    def integer(self, *names: str, default: int | None = None) -> int:
        """The integer under the first of ``names`` that is there. Raises CheckpointError."""
        name = self._first(names)
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if type(value) is not int:
            raise self.wrong(name, "an integer")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """Raises CheckpointError."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return value

    def text(self, *names: str, default: str | None = None) -> str:
        """The text under the first of ``names`` that is there, in lower case. Raises CheckpointError."""
        name = self._first(names)
        value = self.values.get(name)
        if value is None and default is not None:
            return default
        if not isinstance(value, str):
            raise self.wrong(name, "a text")
        return value.lower()

    def choice(self, *names: str, of: Collection[str], default: str | None = None) -> str:
        """As ``text``; raises UnsupportedModelError where it is none of ``of``."""
        value = self.text(*names, default=default)
        if value not in of:
            raise self.refused(self._first(names), f"specbuild reads {', '.join(sorted(of))}")
        return value

    def pair(self, name: str) -> tuple[int, int]:
        """Two sizes. Raises CheckpointError."""
        value = self.values.get(name)
        if not isinstance(value, list) or len(value) != 2 or not all(type(size) is int and size > 0 for size in value):
            raise self.wrong(name, "two positive integers")
        return value[0], value[1]

    def names(self, *names: str) -> tuple[str, ...]:
        """The list of modules or patterns under the first of ``names`` that is there. Raises CheckpointError."""
        name = self._first(names)
        value = self.values.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise self.wrong(name, "a list of names")
        if len(value) > _MOST_NAMES or any(len(entry) > _LONGEST_NAME for entry in value):
            raise self.wrong(name, f"at most {_MOST_NAMES} names of at most {_LONGEST_NAME} characters")
        return tuple(value)

    def section(self, name: str) -> Section | None:
        """The object inside this one; None where there is none. Raises CheckpointError."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(name, "an object")
        return Section(self.path, f"{self.key}.{name}", value)

    def sections(self) -> list[Section]:
        """Every object inside this one. Raises CheckpointError where something else stands there."""
        return [section for name in self.values if (section := self.section(name)) is not None]

    def _first(self, names: tuple[str, ...]) -> str:
        return next((name for name in names if self.values.get(name) is not None), names[0])


def shown(value: object) -> str:
    """``value`` for an error message: one line, not too long."""
    text = "is missing" if value is None else repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
