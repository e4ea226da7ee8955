"""A text that repeats another one with edits, as answers about code do: where it goes on, and what it replaces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MAX_EDIT = 8
"""Tokens of the longest edit that is followed: of what it replaces, and of what stands there instead."""


class Edit(NamedTuple):
    """What a text has in the place of tokens of its source."""

    old: tuple[int, ...]
    new: tuple[int, ...]


class EditedCopy:
    """The position of a text in a source that it repeats, and its edits so far.

    An edit that came once, a new name say, is expected wherever the same tokens of the source come again.
    """

    def __init__(self) -> None:
        self.matched = 0
        """Tokens behind the last unexpected edit that are as expected. 0: the text has left the source."""
        self._source: Sequence[int] = ()
        self._position = self._end = 0
        """The text's token at ``_end`` stands against the source's at ``_position``."""
        self._edits: dict[tuple[int, ...], Edit] = {}
        """The edits so far, by the tokens that they replaced."""

    def begin(self, source: Sequence[int], position: int, end: int, matched: int) -> None:
        """The text goes on at ``end`` as ``source`` at ``position``: the ``matched`` tokens before them are alike."""
        self._source, self._position, self._end, self.matched = source, position, end, matched

    def continuation(self, text: Sequence[int], count: int) -> list[int]:
        """At most ``count`` tokens that are likely to follow ``text``; [] where it is not in the source.

        ``text`` grows from call to call.
        """
        if not self.matched or not self._read(text):
            return []
        begun = tuple(text[self._end :])
        tokens: list[int] = []
        position = self._position
        while len(tokens) < len(begun) + count and (edit := self._expected(position, begun[len(tokens) :])):
            tokens += edit.new
            position += len(edit.old)
        return tokens[len(begun) : len(begun) + count]

    def _read(self, text: Sequence[int]) -> bool:
        """Follow the text to its end. Returns whether that is in the source, or in an expected edit."""
        while following := tuple(text[self._end : self._end + MAX_EDIT]):
            edit = self._expected(self._position, following)
            if edit and len(edit.new) > len(following):
                return True
            if edit:
                self._position += len(edit.old)
                self._end += len(edit.new)
                self.matched += len(edit.new)
            elif not self._pass_edit(text):
                return False
        return True

    def _expected(self, position: int, following: tuple[int, ...]) -> Edit | None:
        """What to expect at a position of the source where the text goes on with ``following``.

        That is the longest known edit, or that one token is kept; None: neither agrees, or the source ends here.
        """
        old = tuple(self._source[position : position + MAX_EDIT])
        edits = [self._edits.get(old[:length]) for length in range(len(old), 0, -1)]
        for edit in (*edits, Edit(old[:1], old[:1]) if old else None):
            if edit and edit.new[: len(following)] == following[: len(edit.new)]:
                return edit
        return None

    def _pass_edit(self, text: Sequence[int]) -> bool:
        """Go on behind an edit that was not expected, and expect it from now on.

        Returns whether the text has come back to its source: whether a token of it stands near by in the source. The
        first one counts, where the edit has changed the text's length least.
        """
        first = self._position
        for length in range(1, min(MAX_EDIT, len(text) - self._end) + 1):
            *new, back = text[self._end : self._end + length]
            positions = range(first, min(len(self._source), first + length + MAX_EDIT))
            near = [position for position in positions if self._source[position] == back]
            if near:
                position = min(near, key=lambda position: abs(position - first - len(new)))
                edit = Edit(tuple(self._source[first:position]), tuple(new))
                if edit.new and 0 < len(edit.old) <= MAX_EDIT:
                    self._edits[edit.old] = edit
                self._position, self._end, self.matched = position + 1, self._end + length, 1
                return True
        if len(text) - self._end > MAX_EDIT:
            self.matched = 0
        return False
