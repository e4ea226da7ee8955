"""A text in another vocabulary than its own: the target's ids to those of a draft with a tokenizer of its own.

The text is translated word by word, as the draft's tokenizer would write it. When tokens are added, only the last word
is translated again. So a draft reads " elephant" as its own tokenizer has it, in however many tokens the target wrote
it. What a draft reads is a matter of how well it drafts, not of what is accepted.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import tokenizers

from specrun.errors import PairError
from specrun.text.token_bytes import TokenBytes
from specrun.text.tokenizer import load_tokenizer, raise_unless_fault
from specrun.text.vocab_mapping import ABSENT, VocabMapping, sample_tokens

_LONGEST_WORD = 24
"""Tokens, for scripts without spaces."""
_KNOWN_WORDS = 1 << 15
"""Words whose translation is kept."""
_NOT_TEXT = re.compile("([\udc80-\udcff]+)")
"""Bytes that are not UTF-8, as Python decodes them with ``surrogateescape``."""


class Translator:
    """Translates words from the target's ids to the draft's."""

    def __init__(
        self,
        target: tokenizers.Tokenizer,
        draft: tokenizers.Tokenizer,
        target_size: int | None = None,
        draft_size: int | None = None,
    ) -> None:
        """The sizes are how many ids the models know; None: those of the tokenizers."""
        names = TokenBytes(target)
        self.mapping = VocabMapping(names, TokenBytes(draft), target_size, draft_size)
        self.description = self.mapping.describe(sample_tokens(target))
        self.draft_prefix = _prefix(draft)
        """Tokens with which the draft's tokenizer begins every text."""
        self._target_prefix = _prefix(target)
        self._draft = draft
        counts = range(len(self.mapping.counterparts))
        self._spellings = [names.of(token) for token in counts]
        self._special = {token for token in counts if names.is_special(token)}
        self._spaced = b"".join(map(names.of, _ids(target, "a"))).startswith(b" ")
        """True if the target's tokenizer puts a space before a text."""
        self._anchors = {anchor: _ids(draft, anchor) for anchor in ("a", "\n")}
        self._encode = functools.lru_cache(_KNOWN_WORDS)(self._encode_bytes)

    def num_prefix(self, tokens: Sequence[int]) -> int:
        """How many tokens ``tokens`` begins with that the target's tokenizer puts before every text."""
        length = len(self._target_prefix)
        return length if list(tokens[:length]) == self._target_prefix else 0

    def words(self, tokens: Sequence[int], begin: int) -> Iterator[tuple[int, int]]:
        """The words of ``tokens`` from ``begin`` on, each as its beginning and its end. Special tokens stand alone."""
        for at in range(begin + 1, len(tokens)):
            if self._begins_word(tokens[at - 1], tokens[at], at - begin):
                yield begin, at
                begin = at
        if begin < len(tokens):
            yield begin, len(tokens)

    def _begins_word(self, before: int, token: int, length: int) -> bool:
        """Whether a word begins with ``token``. length: tokens of the word that ends ``before`` it."""
        if before in self._special or token in self._special:
            return True
        left, right = self._spellings[before], self._spellings[token]
        if length >= _LONGEST_WORD:
            return not b"\x80" <= right[:1] < b"\xc0"  # Not within a character.
        if right.startswith(b" "):
            return not left[-1:].isspace()
        return left.endswith(b"\n") and not right[:1].isspace()

    def translate(self, word: Sequence[int], is_first: bool = False) -> Sequence[int]:
        """The draft's ids of a ``word`` of the target's. is_first: whether no text stands before it."""
        if len(word) == 1 and (not is_first or word[0] in self._special):
            counterpart = self.mapping.counterparts[word[0]]
            if counterpart != ABSENT:
                return (counterpart,)
        spelled = b"".join([self._spellings[token] for token in word])
        if is_first and self._spaced:
            spelled = spelled.removeprefix(b" ")
        return self._encode(spelled, is_first)

    def _encode_bytes(self, spelled: bytes, is_first: bool) -> Sequence[int]:
        token_ids: list[int] = []
        for part in _NOT_TEXT.split(spelled.decode(errors="surrogateescape")):
            if _NOT_TEXT.match(part):
                token_ids += self._encode_not_text(part.encode(errors="surrogateescape"))
            elif part:
                token_ids += self._encode_text(part, is_first and not token_ids)
        return tuple(token_ids)

    def _encode_text(self, text: str, is_first: bool) -> list[int]:
        """The draft's ids of ``text``, which other text stands before unless ``is_first``."""
        if not is_first:
            # Some tokenizers write the beginning of a text differently.
            anchor = "a" if text[0].isspace() else "\n"
            before, token_ids = self._anchors[anchor], _ids(self._draft, anchor + text)
            if token_ids[: len(before)] == before:
                return token_ids[len(before) :]
        return _ids(self._draft, text)

    def _encode_not_text(self, data: bytes) -> Iterator[int]:
        """Tokens of the longest pieces of ``data`` that the draft has; bytes that it does not have are left out."""
        pieces = self.mapping.draft_pieces
        while data:
            size = next((size for size in (3, 2, 1) if data[:size] in pieces), 0)
            if size:
                yield pieces[data[:size]]
            data = data[size or 1 :]


class TranslatedText:
    """One request's text in the draft's ids, as far as it has been followed."""

    def __init__(self, translator: Translator, limit: int) -> None:
        """limit: the most ids. A text that grows longer is not followed any more."""
        self._translator = translator
        self._limit = limit
        self.ids = list(translator.draft_prefix)
        self.num_tokens = 0
        """Number of the target's tokens that ``ids`` stand for."""
        self.is_full = False
        """True once the text is followed no further."""
        self._begin = self._word = -1
        """Indices of the target's tokens with which the text and its last word begin."""
        self._word_ids = len(self.ids)
        """The index in ``ids`` at which the last word begins."""

    def follow(self, tokens: Sequence[int]) -> int:
        """Translate ``tokens``, the whole text. Returns how many of the first ``ids`` are as they were."""
        if self.is_full or len(tokens) == self.num_tokens:
            return len(self.ids)
        if self._begin < 0:
            self._begin = self._word = self._translator.num_prefix(tokens)
        first, new = self._word_ids, list[int]()
        for begin, end in self._translator.words(tokens, self._word):
            self._word, self._word_ids = begin, first + len(new)
            new += self._translator.translate(tokens[begin:end], begin == self._begin)
        new = new or ([] if first else [0])  # An engine reads one token at least.
        same = _num_common(self.ids[first:], new)
        self.ids[first + same :] = new[same:]
        self.num_tokens = len(tokens)
        self._cut()
        return min(first + same, len(self.ids))

    def num_new(self, tokens: Sequence[int]) -> int:
        """How many of ``tokens``, the whole text, ``ids`` do not stand for yet."""
        return 0 if self.is_full else len(tokens) - self.num_tokens

    def extend(self, translated: Sequence[Sequence[int]]) -> None:
        """Add tokens of the target, each as its translation."""
        if not self.is_full:
            self.num_tokens += len(translated)
            self.ids += [token for ids in translated for token in ids]
            self._cut()

    def _cut(self) -> None:
        if len(self.ids) > self._limit:
            self.is_full = True
            del self.ids[self._limit :]


def open_translator(
    target: Path, draft: Path, target_size: int | None = None, draft_size: int | None = None
) -> Translator:
    """What translates between the tokenizers of two directories.

    Raises PairError where they have no token in common, and where one of them cannot encode a plain text.
    """
    try:
        translator = Translator(
            load_tokenizer(target, PairError), load_tokenizer(draft, PairError), target_size, draft_size
        )
    except PairError:
        raise
    except BaseException as problem:
        raise_unless_fault(problem)
        raise PairError(
            f"{draft}: cannot translate between its tokenizer and that of {target} ({problem})"
        ) from problem
    if not translator.mapping.num_texts:
        raise PairError(
            f"{draft}: its tokenizer has no token in common with that of {target}, so nothing can be drafted; use "
            "another draft"
        )
    return translator


def _ids(tokenizer: tokenizers.Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


def _prefix(tokenizer: tokenizers.Tokenizer) -> list[int]:
    """The special tokens that ``tokenizer`` puts before every text."""
    plain, whole = _ids(tokenizer, "a"), tokenizer.encode("a").ids
    starts = (at for at in range(len(whole)) if whole[at : at + len(plain)] == plain)
    return whole[: next(starts, 0)]


def _num_common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many of the first items are equal."""
    pairs = zip(first, second, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))
