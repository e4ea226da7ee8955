"""Which texts the rows of a model's cache hold, and how much of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from specrun.kv_cache import BLOCK
from specrun.kv_cache.prefixes import Prefixes


class KVCache(Protocol):
    """Memory of one model: rows, and a pool of blocks."""

    rows: int
    length: int
    """Positions of a row, S_max."""
    blocks: int

    def clear(self, row: int) -> None:
        """Forget what ``row`` holds: even behind a mask, infinities that a text left there would become NaN."""

    def swap(self, one: int, other: int, held: tuple[int, int]) -> None:
        """Exchange two rows; ``held``: how many of their first positions matter."""

    def save(self, row: int, start: int, blocks: Sequence[int]) -> None:
        """Copy positions ``start ..`` of ``row`` to ``blocks`` of the pool."""

    def load(self, row: int, start: int, blocks: Sequence[int]) -> None:
        """Copy ``blocks`` of the pool to positions ``start ..`` of ``row``."""


class CacheRows:
    """Owns ``lengths``: how many tokens of each row's text are in the model's cache."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.lengths: list[int] = [0] * cache.rows
        self.prefixes = Prefixes(cache.blocks)

    def admit(self, row: int, tokens: Sequence[int]) -> int:
        """Begin a new text in ``row``, with what is kept of texts that begin alike; returns how many tokens."""
        self.cache.clear(row)
        blocks = self.prefixes.match(tokens)
        if blocks:
            self.cache.load(row, 0, blocks)
        self.lengths[row] = len(blocks) * BLOCK
        return self.lengths[row]

    def keep(self, row: int, tokens: Sequence[int]) -> None:
        """Keep the whole blocks of ``tokens`` that ``row`` holds for texts that begin alike."""
        known, blocks = self.prefixes.add(tokens[: self.lengths[row]])
        if blocks:
            try:
                self.cache.save(row, known * BLOCK, blocks)
            except BaseException:
                self.prefixes = Prefixes(self.cache.blocks)  # Some are not what they are said to be.
                raise

    def swap(self, one: int, other: int) -> None:
        """Exchange two rows."""
        lengths = self.lengths
        self.cache.swap(one, other, (lengths[one], lengths[other]))
        lengths[one], lengths[other] = lengths[other], lengths[one]

    def rewind(self, row: int, length: int) -> None:
        """Keep only the first ``length`` tokens of ``row``: a number changes, nothing is copied."""
        self.lengths[row] = min(self.lengths[row], length)

    def next_piece(self, texts: Sequence[Sequence[int]], first: int, most: int) -> list[Sequence[int]] | None:
        """The texts of rows ``first ..`` up to ``most`` tokens behind what each row holds; None where all is held."""
        if not any(self.lacks(texts, first)):
            return None
        lengths = self.lengths[first : first + len(texts)]
        return [text[: length + most] for text, length in zip(texts, lengths, strict=True)]

    def lacks(self, texts: Sequence[Sequence[int]], first: int) -> list[int]:
        """How many tokens each of the rows from ``first`` on lacks of its text."""
        lengths = self.lengths[first : first + len(texts)]
        return [max(0, len(text) - length) for text, length in zip(texts, lengths, strict=True)]
