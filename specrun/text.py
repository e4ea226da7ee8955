"""Token ids to text while they arrive: whole characters only, and nothing of a stop text."""

from __future__ import annotations

from collections.abc import Sequence

import tokenizers
from tokenizers.decoders import DecodeStream


class TextStream:
    """The text of one request's output. ``push`` gives what may be shown; ``text`` is all of it so far.

    The prompt's ids go first, because some tokenizers decode a word differently at the start of a text.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stream = DecodeStream(ids=list(prompt), skip_special_tokens=True)
        self._stop = [text for text in stop if text]
        self._held = ""
        self._shown: list[str] = []
        self.stopped = False
        """Whether a stop text was met; the text ends before it."""

    @property
    def text(self) -> str:
        """Everything shown so far."""
        return "".join(self._shown)

    def push(self, token: int) -> str:
        """Add one token; return the text that is now certain. Bytes of an unfinished character wait."""
        self._held += self._stream.step(self._tokenizer, token) or ""
        ends = [index for index in (self._held.find(text) for text in self._stop) if index >= 0]
        if ends:
            self.stopped = True
            return self._show(min(ends))
        return self._show(len(self._held) - self._possible_stop())

    def finish(self) -> str:
        """The text that was waiting for a stop text that did not come."""
        return "" if self.stopped else self._show(len(self._held))

    def _possible_stop(self) -> int:
        """Length of the longest end of the held text that a stop text may begin with."""
        lengths = range(min(len(self._held), max(map(len, self._stop), default=1) - 1), 0, -1)
        return next((n for n in lengths if any(text.startswith(self._held[-n:]) for text in self._stop)), 0)

    def _show(self, end: int) -> str:
        shown, self._held = self._held[:end], self._held[end:]
        self._shown.append(shown)
        return shown
