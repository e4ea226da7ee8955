"""Calls of tools in the text that a model writes, found while it arrives.

A call is a JSON object with ``name`` and ``arguments`` (or ``parameters``), in the spelling of a ``ToolFormat``. What
is no such object stays text. A half-seen tag is held until it is known what it is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from specrun.text.tools import ExpectedCalls

_HEADER = re.compile(
    r'\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*'
)
"""A call's object up to its arguments."""
_OUTSIDE_STRINGS = frozenset(' \t\r\n{}[]:,"+-.0123456789Eeaflnrstu')
"""The characters that JSON has outside of strings."""


@dataclass(frozen=True)
class CallDelta:
    """What is new of a call."""

    index: int
    """The call's number in the text, from 0."""
    name: str | None
    """The function's name, with the first delta of a call."""
    arguments: str
    """JSON text that follows what came before."""


class Seen(NamedTuple):
    """What is new of a text."""

    content: str
    calls: Sequence[CallDelta]


class ToolCallParser:
    """Divides one text into content and calls. Whitespace around calls belongs to neither."""

    def __init__(self, expected: ExpectedCalls, holds: bool) -> None:
        """holds: give a call when its arguments are known to be a JSON object.

        Otherwise the arguments are given as they arrive, and stay a call where they break off.
        """
        self._form, self._several, self._holds = expected.form, expected.several, holds
        self._opening = re.compile(rf"{re.escape(self._form.tag)}\s*(\{{|\Z|)")
        self._text = ""
        """Text that has come and is not decided."""
        self._object: _Object | None = None
        """The JSON object of a call that has begun."""
        self._before = ""
        """Whitespace and tag before ``_object``: text, where it is no call."""
        self._in_end = False
        """True if a call's end may follow."""
        self._is_fresh = True
        """True if nothing but whitespace has come since the beginning or the last call."""
        self._count = 0
        """Calls so far."""
        self._content: list[str] = []
        self._calls: list[CallDelta] = []

    def push(self, text: str, ended: bool = False) -> Seen:
        """What ``text``, which follows the earlier ones, makes certain. ended: nothing follows it."""
        self._text += text
        step = True
        while step:
            if self._object:
                step = self._read_object(self._object, ended)
            elif self._in_end:
                step = self._read_end(ended)
            else:
                step = self._read_content(ended)
        seen = Seen("".join(self._content), self._calls)
        self._content, self._calls = [], []
        return seen

    # Each returns whether there is more to read.

    def _read_content(self, ended: bool) -> bool:
        if self._count and not self._several:
            self._text = ""
            return False
        begin, where = self._find_object(ended)
        content = self._text[:begin]
        if where is not None or not ended or self._count:
            content = content.rstrip()
        held = self._text[len(content) :]
        self._content.append(content.lstrip() if self._is_fresh and self._count else content)
        self._is_fresh = self._is_fresh and not content
        if where is None:
            self._text = "" if ended else held
            return False
        self._before, self._text = self._text[len(content) : where], self._text[where:]
        self._object = _Object()
        return True

    def _find_object(self, ended: bool) -> tuple[int, int | None]:
        """Positions: the end of the text before a call, as far as is known, and the begin of the call's object."""
        if self._form.is_bare and self._is_fresh and (bare := re.match(r"\s*\{", self._text)):
            return 0, bare.end() - 1
        for tag in self._opening.finditer(self._text):
            if tag[1]:
                return tag.start(), tag.start(1)
            if tag.end() == len(self._text) and not ended:
                return tag.start(), None
        return len(self._text) - (0 if ended else _overlap(self._text, self._form.tag)), None

    def _read_object(self, candidate: _Object, ended: bool) -> bool:
        self._text = candidate.read(self._text)
        if not self._holds:
            self._stream(candidate)
        if not (candidate.has_ended or ended):
            return False
        is_call = candidate.num_sent > 0
        if not is_call and (call := candidate.call()):
            is_call = True
            self._calls += (CallDelta(self._count, call[0], ""), CallDelta(self._count, None, call[1]))
        if not is_call:
            self._content += (self._before, candidate.text)
        self._count += is_call
        self._object, self._in_end, self._is_fresh = None, is_call, is_call
        return True

    def _stream(self, candidate: _Object) -> None:
        """Give what is new of a call's arguments, if they have begun."""
        if candidate.begin is None:
            return
        if not candidate.num_sent:
            self._calls.append(CallDelta(self._count, candidate.name, ""))
        if new := candidate.text[candidate.begin + candidate.num_sent : candidate.end]:
            self._calls.append(CallDelta(self._count, None, new))
            candidate.num_sent += len(new)

    def _read_end(self, ended: bool) -> bool:
        rest = self._text.lstrip()
        if rest.startswith(self._form.end):
            self._text = rest[len(self._form.end) :]
        elif self._form.end.startswith(rest):
            if not ended:
                return False
            self._text = ""
        self._in_end = False
        return True


class _Object:
    """A JSON object, read while it arrives. It may turn out to be none, or a call's."""

    def __init__(self) -> None:
        self.text = ""
        self.has_ended = False
        """True once it is complete, or something follows that no JSON has."""
        self.name = ""
        self.begin: int | None = None
        """The position in ``text`` of the arguments; None before they begin, and if they are in an unusual place."""
        self.end: int | None = None
        """The position in ``text`` behind the arguments."""
        self.num_sent = 0
        """Characters of the arguments that were given away."""
        self._depth = 0
        self._in_string = self._is_escaped = False

    def read(self, text: str) -> str:
        """Take as much of ``text`` as belongs to it; the rest."""
        known, self.text = len(self.text), self.text + text
        for place in range(known, len(self.text)):
            character = self.text[place]
            if self._in_string:
                self._in_string = self._is_escaped or character != '"'
                self._is_escaped = character == "\\" and not self._is_escaped
            elif character not in _OUTSIDE_STRINGS:
                return self._close(place)
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                if self._depth == 1 and self.begin is None and character == "{":
                    self._find_arguments(place)
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 1 and self.begin is not None and self.end is None:
                    self.end = place + 1
                elif self._depth == 0:
                    return self._close(place + 1)
        return ""

    def call(self) -> tuple[str, str] | None:
        """The function's name and its arguments as JSON text; None where it is no call."""
        try:
            if self.begin is not None and isinstance(json.loads(self.text[self.begin : self.end]), dict):
                return self.name, self.text[self.begin : self.end]
            parsed = json.loads(self.text)
        except (ValueError, RecursionError):
            return None
        name, arguments = parsed.get("name"), parsed.get("arguments", parsed.get("parameters"))
        is_call = isinstance(name, str) and isinstance(arguments, dict)
        return (name, json.dumps(arguments, ensure_ascii=False)) if is_call else None

    def _find_arguments(self, place: int) -> None:
        """Whether the arguments begin at ``place``."""
        if header := _HEADER.fullmatch(self.text, 0, place):
            with suppress(ValueError):
                self.name, self.begin = json.loads(header[1]), place

    def _close(self, place: int) -> str:
        """End before ``place``; what follows."""
        self.has_ended = True
        self.text, rest = self.text[:place], self.text[place:]
        return rest


def _overlap(text: str, tag: str) -> int:
    """Length of the longest end of ``text`` that ``tag`` begins with."""
    return next((n for n in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:n])), 0)
