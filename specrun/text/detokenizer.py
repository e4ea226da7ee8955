"""Token ids to text while they arrive: whole characters only, and nothing of a stop text."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import tokenizers

from specrun import arguments
from specrun.errors import RequestError
from specrun.text.tokenizer import raise_unless_fault

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""Character that decoders write for bytes that are not UTF-8."""
_LONGEST_HELD = 8
"""Tokens that wait for the end of a character before a part of them is looked for that is certain."""


class Detokenizer:
    """What decoding token by token must know of a tokenizer. Made once for each tokenizer."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.added_tokens: Mapping[str, int] = {added_token.content: token for token, added_token in added.items()}
        """Ids of added tokens, by content."""
        self._special = {token for token, added_token in added.items() if added_token.special}
        self._bytes = {tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256)}

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of ``tokens``; special tokens have none. Raises RequestError where the tokenizer fails."""
        try:
            return self._tokenizer.decode(tokens, skip_special_tokens=True)
        except BaseException as problem:
            raise_unless_fault(problem)
            raise RequestError(f"the tokenizer cannot decode {arguments.show(tokens)} ({problem})") from problem

    def is_silent(self, token: int) -> bool:
        """Whether ``token`` never has a text: special tokens, and ids that the tokenizer does not know."""
        return token in self._special or self._tokenizer.id_to_token(token) is None

    def is_byte(self, token: int) -> bool:
        """Whether ``token`` is one byte of a byte-fallback vocabulary.

        Such bytes become text when their run has ended: one that is not UTF-8 spoils all of its run.
        """
        return token in self._bytes


class TextStream:
    """The text of one request's output. ``push`` gives what may be shown; ``text`` is all of it so far.

    The whole text is that of the output's ids in one decoding, behind the prompt: some tokenizers decode a word
    differently at the start of a text.
    """

    def __init__(
        self, detokenizer: Detokenizer, prompt: Sequence[int], stop: Sequence[str] = (), shown: Sequence[str] = ()
    ) -> None:
        """shown: special tokens that have a text here."""
        self._detokenizer = detokenizer
        added = detokenizer.added_tokens
        self._shown_tokens = {added[text]: text for text in shown if text in added}
        self._stop = [text for text in stop if text]
        # The last token that is certain, and those whose text is not certain yet.
        before = (token for token in reversed(prompt) if not self._has_no_own_text(token))
        self._context = list(itertools.islice(before, 1))
        self._context_length = len(detokenizer.decode(self._context))
        self._pending: list[int] = []
        self._held = ""
        """Text that is certain, but may be the beginning of a stop text."""
        self._shown: list[str] = []
        self.stop_text: str | None = None
        """Stop text that was met; the text ends before it."""

    @property
    def text(self) -> str:
        """Everything shown so far."""
        return "".join(self._shown)

    @property
    def stopped(self) -> bool:
        """Whether a stop text was met."""
        return self.stop_text is not None

    def push(self, token: int) -> str:
        """Add one token; return the text that is now certain. Bytes of an unfinished character wait."""
        if self._detokenizer.is_silent(token):
            shown = self._shown_tokens.get(token)
            return "" if shown is None else self._take(len(self._pending), self._decode(self._pending) + shown)
        self._pending.append(token)
        if self._detokenizer.is_byte(token):
            return ""
        text = self._decode(self._pending)
        if not text.endswith(_REPLACEMENT):
            return self._take(len(self._pending), text)
        if len(self._pending) <= _LONGEST_HELD:
            return ""
        count = self._whole_characters(text)
        return self._take(count, self._decode(self._pending[:count]))

    def finish(self) -> str:
        """The text that was waiting: for the end of a character, or for a stop text that did not come."""
        if self.stopped:
            return ""
        text = self._take(len(self._pending), self._decode(self._pending))
        return text if self.stopped else text + self._show(len(self._held))

    def _has_no_own_text(self, token: int) -> bool:
        return self._detokenizer.is_silent(token) or self._detokenizer.is_byte(token)

    def _decode(self, tokens: Sequence[int]) -> str:
        """The text of ``tokens`` behind the last certain one."""
        return self._detokenizer.decode([*self._context, *tokens])[self._context_length :]

    def _whole_characters(self, text: str) -> int:
        """How many of the pending tokens, whose text is ``text``, end with a character, as far as the last ones tell.

        A character has four bytes at most, so among so many places there is one between two characters.
        """
        for count in range(len(self._pending) - 1, len(self._pending) - 5, -1):
            if self._decode(self._pending[:count]) + self._detokenizer.decode(self._pending[count:]) == text:
                return count
        return 0

    def _take(self, count: int, text: str) -> str:
        """Let the first ``count`` pending tokens be ``text``; show it, but for what may begin a stop text."""
        if count:
            self._context = self._pending[count - 1 : count]
            self._context_length = len(self._detokenizer.decode(self._context))
            del self._pending[:count]
        self._held += text
        ends = [(index, text) for text in self._stop if (index := self._held.find(text)) >= 0]
        if ends:
            end, self.stop_text = min(ends)
            return self._show(end)
        return self._show(len(self._held) - self._possible_stop())

    def _possible_stop(self) -> int:
        """Length of the longest end of the held text that a stop text may begin with."""
        lengths = range(min(len(self._held), max(map(len, self._stop), default=1) - 1), 0, -1)
        return next((n for n in lengths if any(text.startswith(self._held[-n:]) for text in self._stop)), 0)

    def _show(self, end: int) -> str:
        shown, self._held = self._held[:end], self._held[end:]
        self._shown.append(shown)
        return shown
