"""Calls of tools in the text that a model writes, found while it arrives.

How calls look is said by a ``ToolFormat``. What is no call stays text. A half-seen beginning is held until it is known
what it is.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import regex

from specrun.text.tool_formats.base import LONGEST_HELD, CallReader, Schema, ToolFormat

_compiled = functools.cache(regex.compile)


class ExpectedCalls(NamedTuple):
    """The calls that a text may hold."""

    form: ToolFormat
    several: bool
    """True if more calls than the first count."""
    are_certain: bool = False
    """True if the text is nothing but calls."""
    schemas: Mapping[str, Schema] = {}
    """JSON schemas of the functions' arguments, by name."""


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


@dataclass
class _Candidate:
    """A text that may be a call."""

    before: str
    """Whitespace and beginning before what ``reader`` reads: text, where it is no call."""
    reader: CallReader
    num_sent: int = 0
    """Characters of the arguments that were given away."""


class ToolCallParser:
    """Divides one text into content and calls. Whitespace around calls belongs to neither."""

    def __init__(self, expected: ExpectedCalls, holds: bool) -> None:
        """holds: give a call when its arguments are known to be a JSON object.

        Otherwise the arguments are given as they arrive, and stay a call where they break off.
        """
        self.form = expected.form
        self._expected, self._holds = expected, holds
        self._text = ""
        """Text that has come and is not decided."""
        self._candidate: _Candidate | None = None
        self._closings: list[str] = []
        """Expressions of what may still belong to the last call."""
        self._may_follow = False
        """True directly behind a call."""
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
            if self._candidate:
                step = self._read_call(self._candidate, ended)
            elif self._may_follow:
                step = self._read_behind(ended)
            else:
                step = self._read_content(ended)
        seen = Seen("".join(self._content), self._calls)
        self._content, self._calls = [], []
        return seen

    # Each returns whether there is more to read.

    def _read_content(self, ended: bool) -> bool:
        if self._count and not self._expected.several:
            self._text = ""
            return False
        opening = self._find_opening(ended)
        if opening and opening.partial and len(self._text) - opening.start() > LONGEST_HELD:
            opening = None
        content = self._text[: opening.start()] if opening else self._text
        if opening or not ended or self._count:
            content = content.rstrip()
        self._content.append(content.lstrip() if self._is_fresh and self._count else content)
        self._is_fresh = self._is_fresh and not content
        if opening is None or opening.partial:
            self._text = "" if ended else self._text[len(content) :]
            return False
        self._begin(opening, len(content))
        return True

    def _find_opening(self, ended: bool) -> Any:
        """The match of a call's beginning, perhaps a part of one; None: there is none."""
        if self.form.bare and self._is_fresh:
            bare = _compiled(self.form.bare).match(self._text, partial=not ended)
            if bare:
                return bare
        return _compiled(self.form.opening).search(self._text, partial=not ended)

    def _begin(self, opening: Any, start: int) -> None:
        """Read what follows ``opening``. start: where the text before a call ends."""
        name = opening.groupdict().get("name") or ""
        reader = self.form.reader(name, self._expected.schemas)
        self._candidate = _Candidate(self._text[start : opening.end()], reader)
        self._text = self._text[opening.end() :]

    def _read_call(self, candidate: _Candidate, ended: bool) -> bool:
        reader = candidate.reader
        self._text = reader.read(self._text)
        if not self._holds and reader.arguments:
            self._send(candidate, reader.name, reader.arguments)
        if not (reader.has_ended or ended):
            return False
        call = reader.call()
        if call and not candidate.num_sent:
            self._send(candidate, *call)
        is_call = candidate.num_sent > 0
        if not is_call:
            self._content += (candidate.before, reader.text)
        self._count += is_call
        self._candidate, self._may_follow, self._is_fresh = None, is_call, is_call
        self._closings = list(self.form.closings)
        return True

    def _send(self, candidate: _Candidate, name: str, arguments: str) -> None:
        """Give what is new of a call."""
        if not candidate.num_sent:
            self._calls.append(CallDelta(self._count, name, ""))
        if new := arguments[candidate.num_sent :]:
            self._calls.append(CallDelta(self._count, None, new))
            candidate.num_sent += len(new)

    def _read_behind(self, ended: bool) -> bool:
        """Behind a call: another one, or what closes it."""
        if self.form.following and self._expected.several:
            match = _compiled(self.form.following).match(self._text, partial=not ended)
            if match and not match.partial:
                self._begin(match, 0)
                return True
            if match and self._text.strip() and len(self._text) <= LONGEST_HELD:
                return False
        while self._closings:
            match = _compiled(self._closings[0]).match(self._text, partial=True)
            is_part = match and match.partial and not ended
            if is_part and len(self._text) <= LONGEST_HELD:
                return False
            if match and not is_part:
                self._text = self._text[match.end() :]
            del self._closings[0]
        self._may_follow = False
        return True
