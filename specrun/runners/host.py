"""One model and its cache: feeds what the cache has not seen."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from specrun.backends import Backend, Pass
from specrun.kv_cache.rows import CacheRows
from specrun.sampling import Floats

_STEP = 64
"""Positions of a row are a multiple of this."""


class HostFeed(NamedTuple):
    """A forward pass's inputs: [B, S], [B], [B, K]."""

    input_ids: list[list[int]]
    write_indices: list[int]
    logits_indices: list[list[int]]


def arrange(
    texts: Sequence[Sequence[int]],
    drafts: Sequence[Sequence[int]],
    lengths: Sequence[int],
    wanted: Sequence[int],
    room: int,
    vocab: int,
) -> HostFeed:
    """What feeds every row's text and drafts from ``length`` on, right-padded, for the last ``wanted`` tokens' logits.

    room: positions of a row in the cache; vocab: ids that the model knows.
    """
    # Texts may be long and out of the processor's caches: only what is fed is looked at.
    ends = [len(tokens) + len(more) for tokens, more in zip(texts, drafts, strict=True)]
    width = max(1, *(end - length for end, length in zip(ends, lengths, strict=True)))
    most, last = max(1, *wanted), vocab - 1
    feed = HostFeed([], [], [])
    for row, (length, count) in enumerate(zip(lengths, wanted, strict=True)):
        # Padding writes too. Near the end of the cache a row starts earlier and writes what is already there.
        start = min(length, room - width)
        end = ends[row] - start
        # A target with a padded embedding may commit ids that a draft without the padding has no row for.
        new = [min(token, last) for token in (*texts[row][start:], *drafts[row])]
        feed.input_ids.append(new + [0] * (width - end))
        feed.write_indices.append(start)
        feed.logits_indices.append([*range(end - count, end), *[0] * (most - count)])
    return feed


class ModelRunner:
    """Feeds one model; ``rows`` knows how much of each text its cache holds, and everything else is derived.

    The same rule serves prompts, draft steps, verification and what follows a rejection: a call feeds
    ``tokens[length:]`` of every row; a length is lowered and nothing copied. What runs between an engine's passes finds
    the processor's caches full of weights, so it costs what it touches, not what it computes.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.rows = CacheRows(backend.cache)
        self.seconds = 0.0
        """Time spent in the engine so far."""
        self.calls = 0

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self.backend.config.graph.vocab_size

    def reserve(self, rows: int, length: int, used: int = 0) -> None:
        """Have room for ``rows`` rows of ``length`` tokens, drafts included; the first ``used`` rows stay.

        Attention costs what the rows' length is, so that follows the texts: by steps, so that passes stay bound.
        """
        cache, (rows, length) = self.backend.cache, self._size(rows, length, used)
        held = self.rows.lengths[:used]
        if (rows, length) != (cache.rows, cache.length):
            self.rows.lengths = [0] * rows  # Where it is broken off nothing is held, and texts are read again.
            self.backend.resize(rows, length, used)
        self.rows.lengths = held + [0] * (rows - used)

    def missing_bytes(self, rows: int, length: int, used: int) -> int:
        """What ``reserve`` would allocate."""
        rows, length = self._size(rows, length, used)
        size = self.backend.config.graph.cache_bytes(rows, length)
        return size if size > self.backend.cache.nbytes else 0

    def _size(self, rows: int, length: int, used: int) -> tuple[int, int]:
        """Rows and positions of a cache for ``reserve``."""
        cache, length = self.backend.cache, -(-length // _STEP) * _STEP
        if not used:
            return rows, length
        if rows > cache.rows:  # More will come, and to make room moves all that there is.
            rows = max(rows, min(2 * cache.rows, self.backend.config.build_config.max_batch_size))
        return max(rows, cache.rows), max(length, cache.length)

    def read(self, texts: Sequence[Sequence[int]], first: int, most: int) -> None:
        """Feed up to ``most`` more tokens of the texts in rows ``first ..``, where their rows lack any.

        The work is one pass of at most max_input_len tokens a row.
        """
        most = min(most, self.backend.config.build_config.max_input_len)
        if pieces := self.rows.next_piece(texts, first, most):
            self._feed(pieces, [()] * len(texts), [0] * len(texts), first)

    def forward(
        self, texts: Sequence[Sequence[int]], wanted: Sequence[int], drafts: Sequence[Sequence[int]] = ()
    ) -> Floats:
        """Feed the tokens of rows 0, 1, .. that the cache lacks; return the logits after the last ones.

        texts: the whole token sequence of each row; drafts: what follows it, if anything; wanted: of how many last
        positions logits are, at most as many as are fed. Returns [B, max(wanted), V]; row r is valid up to wanted[r].
        The memory is reused by the next call.
        Long inputs go in pieces of at most max_input_len tokens; short rows wait for the last piece.
        """
        drafts = drafts or [()] * len(texts)
        longest = max(len(tokens) - length for tokens, length in zip(texts, self.rows.lengths, strict=False))
        piece = max(self.backend.config.build_config.max_input_len, *wanted)
        for left in range((longest - 1) // piece, 0, -1):
            # Each row leaves whole pieces for later, so that its last tokens are fed in the last call.
            pairs = zip(texts, self.rows.lengths, strict=False)
            heads = [tokens[: max(length, len(tokens) - left * piece)] for tokens, length in pairs]
            self._feed(heads, [()] * len(texts), [0] * len(texts), 0)
        return self._feed(texts, drafts, wanted, 0)

    def extend(self, tokens: Sequence[int | None]) -> Floats:
        """Feed one more token of rows 0, 1, ..; None for a row that rests. Returns the logits after them [B, 1, V]."""
        step = self.backend.bind(0, len(tokens), 1, 1)
        lengths, last = self.rows.lengths, self.vocab_size - 1
        for row, token in enumerate(tokens):
            # A row that rests writes behind its text, where nothing is.
            step.write_indices[row] = lengths[row]
            if token is not None:
                step.input_ids[row, 0] = min(token, last)
                lengths[row] += 1
        self._run(step)
        return step.logits

    def _feed(
        self, texts: Sequence[Sequence[int]], drafts: Sequence[Sequence[int]], wanted: Sequence[int], first: int
    ) -> Floats:
        own = slice(first, first + len(texts))
        feed = arrange(texts, drafts, self.rows.lengths[own], wanted, self.backend.cache.length, self.vocab_size)
        step = self.backend.bind(first, len(texts), len(feed.input_ids[0]), len(feed.logits_indices[0]))
        step.input_ids[...], step.write_indices[...], step.logits_indices[...] = feed
        self._run(step)
        self.rows.lengths[own] = [len(tokens) + len(more) for tokens, more in zip(texts, drafts, strict=True)]
        return step.logits

    def _run(self, step: Pass) -> None:
        began = time.perf_counter()
        step.run()
        self.seconds += time.perf_counter() - began
        self.calls += 1
