"""One model on the host and its cache: feeds the tokens that the cache lacks."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from specrun.backends import Backend, Pass
from specrun.engine_dir.contract import UNUSED_TOKEN
from specrun.kv_cache.rows import RecurrentRows, RowIds, rows_of
from specrun.sampling.sampler import Floats

_LENGTH_STEP = 64
"""The length of a row is a multiple of so many positions."""
_MOST_SPARE = 2
"""A cache without texts in it keeps its size if that is at most so many times what the next ones need."""
_RECURRENT_CHUNK = 64
"""The most tokens of a row in one pass of a model with recurrent layers. Its rows have so much room behind their texts:
padding is written there, because a pass cannot begin before what the states have read."""


class HostFeed(NamedTuple):
    """The inputs of a forward pass, as lists: [B, S], [B], [B, K]."""

    input_ids: list[list[int]]
    write_indices: list[int]
    logits_indices: list[list[int]]


def build_inputs(
    token_ids: RowIds,
    drafts: RowIds,
    lengths: Sequence[int],
    num_logits: Sequence[int],
    capacity: int,
    vocab_size: int,
    nothing_wanted: int = 0,
    padding: int = 0,
) -> HostFeed:
    """The inputs that feed each row's tokens and draft tokens that the cache lacks, right-padded.

    lengths: cached tokens of each row. num_logits: number of last tokens of each row whose logits are wanted. capacity:
    positions of a row in the cache. vocab_size: ids that the model knows. nothing_wanted: entry of ``logits_indices``
    for logits that only other rows want. padding: id behind a row's tokens.
    """
    texts = list(zip(token_ids, drafts, lengths, num_logits, strict=True))
    query_len = max(1, *(len(tokens) + len(more) - length for tokens, more, length, _ in texts))
    max_logits, last_id, feed = max(1, *num_logits), vocab_size - 1, HostFeed([], [], [])
    for tokens, more, length, count in texts:
        # Padding is written too. Near the end of the cache a row starts earlier and writes what is already there.
        start = min(length, capacity - query_len)
        # A target with a padded embedding may commit ids that a draft without the padding has no row for.
        new = [min(token, last_id) for token in (*tokens[start:], *more)]
        end = len(new)
        feed.input_ids.append(new + [padding] * (query_len - end))
        feed.write_indices.append(start)
        # The logits of an unused token cost nothing in engines that skip it.
        nothing = query_len - 1 if padding == UNUSED_TOKEN and end < query_len else nothing_wanted
        feed.logits_indices.append([*range(end - count, end), *[nothing] * (max_logits - count)])
    return feed


class ModelRunner:
    """Feeds one model. ``rows`` knows how many tokens of each row its cache holds, and everything else follows from it.

    Prompts, draft steps and verification follow one rule: a call feeds ``tokens[length:]`` of every row. A rejection
    lowers the length, and nothing is copied. Between two engine calls the processor's caches are full of weights. So
    this code takes the longer the more memory it touches.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.vocab_size = backend.config.graph.vocab_size
        """Number of ids in a row of logits."""
        self.rows = rows_of(backend.cache, backend.config.graph)
        self._padding = UNUSED_TOKEN if backend.config.backend.skips_unused_tokens else 0
        self.head: ModelRunner | None = None
        """The head whose cache has the rows and positions of this one's."""
        self.has_states = isinstance(self.rows, RecurrentRows)
        self.most_tokens = backend.config.build_config.max_input_len
        """Tokens of a row in one pass."""
        if self.has_states:
            self.most_tokens = min(self.most_tokens, _RECURRENT_CHUNK)
        self.seconds = 0.0
        """Time spent in the engine so far."""
        self.calls = 0

    def reserve(self, num_rows: int, length: int, used: int = 0) -> None:
        """Make the cache large enough for ``num_rows`` rows of ``length`` tokens, drafts included.

        The first ``used`` rows keep their contents. Attention takes time for every position of a row, so the rows are
        only as long as the texts need. They grow in steps, because every growth unbinds all passes. A head's rows are
        those of its target, which must be reserved first. Raises MemoryError; rows in use are as before then.
        """
        cache, (num_rows, length) = self.backend.cache, self._size(num_rows, length, used)
        if cache_owner := self.backend.cache_owner:
            num_rows, length = cache_owner.cache.rows, cache_owner.cache.length
        if (num_rows, length) != (cache.rows, cache.length):
            try:
                if self.head:
                    self.head.backend.cache.allocate(num_rows, length)  # Both grow, or none.
                self.backend.resize(num_rows, length, used)
            except MemoryError:
                raise
            except BaseException:  # The rows count as empty, and are prefilled again.
                self.rows.resize(num_rows, ())
                raise
        self.rows.resize(num_rows, self.rows.lengths[:used])

    def missing_bytes(self, num_rows: int, length: int, used: int) -> int:
        """Bytes that ``reserve`` would allocate."""
        num_rows, length = self._size(num_rows, length, used)
        graph = self.backend.config.graph
        size = graph.cache_bytes(num_rows, length) + graph.state_bytes(num_rows)
        return size if size > self.backend.cache.nbytes else 0

    def _size(self, num_rows: int, length: int, used: int) -> tuple[int, int]:
        """The rows, and positions of a row, that ``reserve`` makes."""
        if self.has_states:
            length += _RECURRENT_CHUNK
        cache, length = self.backend.cache, -(-length // _LENGTH_STEP) * _LENGTH_STEP
        if not used:
            size, fits = cache.rows * cache.length, num_rows <= cache.rows and length <= cache.length
            # Longer rows cost nothing where engines do not read what the mask hides, and passes stay bound.
            if self._padding == UNUSED_TOKEN and fits and size <= _MOST_SPARE * num_rows * length:
                return cache.rows, cache.length
            return num_rows, length
        if num_rows > cache.rows:  # Growing moves all rows, so their number at least doubles.
            num_rows = max(num_rows, min(2 * cache.rows, self.backend.config.build_config.max_batch_size))
        return max(num_rows, cache.rows), max(length, cache.length)

    def prefill(self, token_ids: RowIds, first: int, max_tokens: int) -> None:
        """Feed up to ``max_tokens`` more tokens that the cache lacks of each row from ``first`` on, in one engine call.

        token_ids: the rows' whole texts. A call feeds at most max_input_len tokens of a row.
        """
        max_tokens = min(max_tokens, self.most_tokens)
        if chunk := self.rows.next_chunk(token_ids, first, max_tokens):
            self._feed(chunk, [()] * len(token_ids), [0] * len(token_ids), first, whole_blocks=True)

    def score(self, token_ids: Sequence[int], row: int, max_tokens: int) -> Floats:
        """Feed up to ``max_tokens`` more tokens that the cache lacks of one row's text ``token_ids``.

        Returns the logits after each of them, float32 [count, V]. The next call overwrites them.
        """
        chunk = token_ids[: self.rows.lengths[row] + max_tokens]
        count = len(chunk) - self.rows.lengths[row]
        return self._feed([chunk], [()], [count], row)[0, :count]

    def forward(self, token_ids: RowIds, num_logits: Sequence[int], drafts: RowIds = ()) -> Floats:
        """Feed the tokens of rows 0, 1, .. that the cache lacks. Returns the logits of the last ones.

        token_ids: each row's whole text. drafts: the draft tokens behind it. num_logits: number of last tokens of each
        row whose logits are wanted, no more than are fed. Returns float32 [B, max(num_logits) or more, V]; of row r the
        first num_logits[r] are valid, until the next call.
        """
        nothing, chunk = [()] * len(token_ids), max(self.most_tokens, *num_logits)
        longest = max(len(tokens) - length for tokens, length in zip(token_ids, self.rows.lengths, strict=False))
        for left in range((longest - 1) // chunk, 0, -1):  # Each row leaves its last tokens for the last call.
            pairs = zip(token_ids, self.rows.lengths, strict=False)
            heads = [tokens[: max(length, len(tokens) - left * chunk)] for tokens, length in pairs]
            self._feed(heads, nothing, [0] * len(token_ids), 0)
        return self._feed(token_ids, drafts or nothing, num_logits, 0)

    def extend(self, tokens: Sequence[int | None]) -> Floats:
        """Feed one more token of rows 0, 1, .., or none of a row with None. Returns their logits [B, 1, V]."""
        step = self.backend.bind(0, len(tokens), 1, 1)
        lengths, last_id = self.rows.lengths, self.vocab_size - 1
        for row, token in enumerate(tokens):
            # A row with None writes behind its text, where nothing is valid.
            step.write_indices[row] = lengths[row]
            step.logits_indices[row, 0] = 0
            step.input_ids[row, 0] = self._padding if token is None else min(token, last_id)
        self.rows.set_lengths(0, [length + (token is not None) for length, token in zip(lengths, tokens, strict=False)])
        self.rows.begin(step, 0, [()] * len(tokens))  # What is fed behind the texts may be taken back.
        self._run(step)
        return step.logits

    def _feed(
        self, token_ids: RowIds, drafts: RowIds, num_logits: Sequence[int], first: int, whole_blocks: bool = False
    ) -> Floats:
        """Feed what the cache lacks of each row. Draft tokens may be rejected. whole_blocks: see ``RecurrentRows``."""
        lengths, nothing = self.rows.lengths[first : first + len(token_ids)], self.backend.config.graph.nothing_wanted
        sizes = self.backend.cache.length, self.vocab_size
        feed = build_inputs(token_ids, drafts, lengths, num_logits, *sizes, nothing, self._padding)
        step = self.backend.bind(first, len(token_ids), len(feed.input_ids[0]), len(feed.logits_indices[0]))
        step.input_ids[...], step.write_indices[...], step.logits_indices[...] = feed
        self.rows.begin(step, first, token_ids, whole_blocks)
        self._run(step)
        self.rows.set_lengths(first, [len(tokens) + len(more) for tokens, more in zip(token_ids, drafts, strict=True)])
        return step.logits

    def _run(self, step: Pass) -> None:
        began = time.perf_counter()
        step.run()
        self.seconds += time.perf_counter() - began
        self.calls += 1
