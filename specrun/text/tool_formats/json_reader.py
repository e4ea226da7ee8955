"""Arguments in JSON: of a call that is a JSON object, or of one whose name stands before them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress

from typing_extensions import override

from specrun.text.tool_formats.base import CallReader, Schema

_HEADER = re.compile(
    r'\{\s*(?:"(?:type|id|tool_call_id)"\s*:\s*"(?:[^"\\]|\\.)*"\s*,\s*)*"(?:name|tool_name)"\s*:\s*'
    r'("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*'
)
"""A call's object up to its arguments."""
_OUTSIDE_STRINGS = frozenset(' \t\r\n{}[]:,"+-.0123456789Eeaflnrstu')
"""The characters that JSON has outside of strings."""


class _JsonReader(CallReader):
    """Reads one JSON object. ``_arguments_depth``: the depth in it at which the arguments' object begins."""

    _arguments_depth = 0

    def __init__(self) -> None:
        super().__init__()
        self._depth = 0
        self._in_string = self._is_escaped = False
        self._begin: int | None = None
        """The position in ``text`` of the arguments; None before they begin, and if they are in an unusual place."""
        self._end: int | None = None
        """The position in ``text`` behind the arguments."""

    @override
    def read(self, text: str) -> str:
        known, self.text = len(self.text), self.text + text
        rest = self._scan(known)
        if self._begin is not None:
            self.arguments = self.text[self._begin : self._end]
        return rest

    def _scan(self, known: int) -> str:
        for index in range(known, len(self.text)):
            character = self.text[index]
            if self._in_string:
                self._in_string = self._is_escaped or character != '"'
                self._is_escaped = character == "\\" and not self._is_escaped
            elif character not in _OUTSIDE_STRINGS:
                return self._close(index)
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                if self._depth == self._arguments_depth and self._begin is None and character == "{":
                    self._find_arguments(index)
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == self._arguments_depth and self._begin is not None and self._end is None:
                    self._end = index + 1
                if self._depth <= 0:
                    return self._close(index + 1)
        return ""

    def _find_arguments(self, index: int) -> None:
        self._begin = index

    def _close(self, index: int) -> str:
        """End before ``index``; what follows."""
        self.has_ended = True
        self.text, rest = self.text[:index], self.text[index:]
        return rest


class JsonArguments(_JsonReader):
    """The arguments of a call whose name stood before them."""

    def __init__(self, name: str, _schemas: Mapping[str, Schema]) -> None:
        super().__init__()
        self.name = name

    @override
    def call(self) -> tuple[str, str] | None:
        try:
            return (self.name, self.text) if isinstance(json.loads(self.text), dict) else None
        except (ValueError, RecursionError):
            return None


class JsonCall(_JsonReader):
    """An object with ``name`` and ``arguments``, or ``parameters``."""

    _arguments_depth = 1

    def __init__(self, _name: str, _schemas: Mapping[str, Schema]) -> None:
        super().__init__()

    @override
    def call(self) -> tuple[str, str] | None:
        try:
            if self._begin is not None and isinstance(json.loads(self.arguments), dict):
                return self.name, self.arguments
            parsed = json.loads(self.text)
        except (ValueError, RecursionError):
            return None
        if not isinstance(parsed, dict):
            return None
        name, arguments = parsed.get("name"), parsed.get("arguments", parsed.get("parameters"))
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return None
        return name, json.dumps(arguments, ensure_ascii=False)

    @override
    def _find_arguments(self, index: int) -> None:
        """Whether the arguments begin at ``index``."""
        if header := _HEADER.fullmatch(self.text, 0, index):
            with suppress(ValueError):
                self.name, self._begin = json.loads(header[1]), index


def named(name: str, schemas: Mapping[str, Schema]) -> CallReader:
    """The reader of a call's object, or where the name is known of the arguments alone."""
    return JsonArguments(name, schemas) if name else JsonCall(name, schemas)
