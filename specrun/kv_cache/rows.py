"""How many tokens of each request a model's cache holds, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from specrun.engine_dir.config import GraphInfo
from specrun.kv_cache import BLOCK
from specrun.kv_cache.kept_states import TOKENS_OF_STATE, KeptStates, blocks_up_to_a_state
from specrun.kv_cache.prefix_cache import PrefixCache, common_blocks

RowIds = Sequence[Sequence[int]]
"""Token ids of each row."""


class KVCache(Protocol):
    """The memory of one model's KV cache: rows, and a pool of blocks for the prefix cache."""

    rows: int
    length: int
    """Positions of a row, S_max."""
    blocks: int
    """Number of blocks in the pool."""

    def clear(self, row: int) -> None:
        """Write zeros to ``row``. An infinity in it would become NaN, even at positions that the mask hides.

        Where the engine does not read those, only what recurrent layers keep is cleared.
        """

    def swap(self, row: int, other: int, lengths: tuple[int, int]) -> None:
        """Exchange two rows. lengths: how many positions of each are in use."""

    def save(self, row: int, start: int, blocks: Sequence[int]) -> None:
        """Copy the positions of ``row`` from ``start`` on to ``blocks`` of the pool."""

    def load(self, row: int, start: int, blocks: Sequence[int]) -> None:
        """Copy ``blocks`` of the pool to the positions of ``row`` from ``start`` on."""


class RecurrentCache(KVCache, Protocol):
    """The memory of a model's cache, with what recurrent layers keep of rows, and a pool of slots for that."""

    kept_states: int
    """Number of slots in the pool."""

    def clear_states(self, row: int) -> None:
        """Write zeros to what recurrent layers keep of ``row``: so a text begins."""

    def save_state(self, row: int, slot: int) -> None:
        """Copy what recurrent layers keep of ``row`` to a ``slot`` of the pool."""

    def load_state(self, row: int, slot: int) -> None:
        """Copy a ``slot`` of the pool to what recurrent layers keep of ``row``."""


class StateIndices(Protocol):
    """The inputs of a pass for recurrent layers, [B] each; see ``contract``."""

    state_indices: npt.NDArray[np.int64]
    keep_indices: npt.NDArray[np.int64]


class CacheRows:
    """Owns ``lengths``: how many tokens of each row's text are in the model's cache."""

    def __init__(self, cache: KVCache) -> None:
        self.cache = cache
        self.lengths: list[int] = [0] * cache.rows
        self.prefix_cache = PrefixCache(cache.blocks)

    def admit(self, row: int, tokens: Sequence[int]) -> int:
        """Begin a new text in ``row`` with its cached prefix. Returns how many tokens that prefix has."""
        self.cache.clear(row)
        blocks = self.prefix_cache.match(tokens)
        if blocks:
            self.cache.load(row, 0, blocks)
        self.lengths[row] = len(blocks) * BLOCK
        return self.lengths[row]

    def should_wait(self, tokens: Sequence[int], prompts: RowIds) -> bool:
        """Whether more of ``tokens`` will be cached once ``prompts`` are prefilled."""
        return self.prefix_cache.should_wait(tokens, prompts)

    def cache_prefix(self, row: int, tokens: Sequence[int]) -> None:
        """Copy the whole blocks of ``tokens`` that ``row`` holds to the prefix cache, unless they are there.

        tokens: the text of the row.
        """
        try:
            known, blocks = self.prefix_cache.add(tokens[: self.lengths[row]])
            if blocks:
                self.cache.save(row, known * BLOCK, blocks)
        except BaseException:
            self.prefix_cache = PrefixCache(self.cache.blocks)  # It is unknown which blocks were written.
            raise

    def swap(self, row: int, other: int) -> None:
        """Exchange two rows."""
        lengths = self.lengths
        self.cache.swap(row, other, (lengths[row], lengths[other]))
        lengths[row], lengths[other] = lengths[other], lengths[row]

    def rewind(self, row: int, length: int) -> None:
        """Keep at most the first ``length`` tokens of ``row``. Only a number changes."""
        self.lengths[row] = min(self.lengths[row], length)

    def set_lengths(self, first: int, lengths: Sequence[int]) -> None:
        """Note what a pass leaves in the cache: so many tokens in each row from ``first`` on."""
        self.lengths[first : first + len(lengths)] = lengths

    def end_round(self, row: int, length: int, read: int) -> None:
        """Note what a round on a device has left of ``row``.

        length: of its text's tokens so many are in the cache. read: so many have been read by recurrent states; 0
        where the device alone knows.
        """
        self.lengths[row] = length

    def resize(self, rows: int, used: Sequence[int]) -> None:
        """Have ``rows`` rows, whose first ones hold ``used`` tokens; the others are empty."""
        self.lengths = [*used, *[0] * (rows - len(used))]

    def begin(self, step: StateIndices, first: int, texts: RowIds, whole_blocks: bool = False) -> None:
        """Say to a pass over the rows from ``first`` on what recurrent states have read, and are to read.

        texts: the tokens of each row that stand, those of the pass included. whole_blocks: states stay behind a whole
        block, where they can be kept.
        """

    def next_chunk(self, token_ids: RowIds, first: int, max_tokens: int) -> list[Sequence[int]] | None:
        """The texts of the rows from ``first`` on, each cut after ``max_tokens`` uncached tokens; None: all is cached.

        token_ids: the whole texts.
        """
        if not any(self.num_uncached(token_ids, first)):
            return None
        lengths = self.lengths[first : first + len(token_ids)]
        return [tokens[: length + max_tokens] for tokens, length in zip(token_ids, lengths, strict=True)]

    def num_uncached(self, token_ids: RowIds, first: int) -> list[int]:
        """How many tokens of each text the cache lacks. token_ids: the texts of the rows from ``first`` on."""
        return [self.lacks(row, len(tokens)) for row, tokens in enumerate(token_ids, first)]

    def lacks(self, row: int, length: int) -> int:
        """How many tokens of a text of ``length`` the cache lacks in ``row``."""
        return max(0, length - self.lengths[row])


class NoCacheRows(CacheRows):
    """The rows of a model that keeps nothing of texts and so lacks nothing: its lengths are wherever a round begins."""

    @override
    def admit(self, row: int, tokens: Sequence[int]) -> int:
        self.lengths[row] = 0
        return 0

    @override
    def cache_prefix(self, row: int, tokens: Sequence[int]) -> None:
        pass

    @override
    def swap(self, row: int, other: int) -> None:
        pass

    @override
    def rewind(self, row: int, length: int) -> None:
        """Begin behind ``length`` tokens, read or not."""
        self.lengths[row] = length

    @override
    def lacks(self, row: int, length: int) -> int:
        return 0


class RecurrentRows(CacheRows):
    """The rows of a model with recurrent layers, which cannot forget a token that their states have read."""

    cache: RecurrentCache

    def __init__(self, cache: RecurrentCache) -> None:
        super().__init__(cache)
        self._kept = KeptStates(cache.kept_states)
        self.read = [0] * cache.rows
        """[rows]: number of tokens that the states of each row have read, at most its length; see ``contract``."""

    @override
    def admit(self, row: int, tokens: Sequence[int]) -> int:
        """A prefix ends where a state was kept."""
        self.cache.clear(row)
        blocks = self.prefix_cache.known(tokens)
        count, slot = self._kept.deepest([block.serial for block in blocks])
        if slot is not None:
            self.cache.load(row, 0, [block.number for block in blocks[:count]])
            self.cache.load_state(row, slot)
        self.lengths[row] = self.read[row] = count * BLOCK
        return self.lengths[row]

    @override
    def should_wait(self, tokens: Sequence[int], prompts: RowIds) -> bool:
        """Blocks are of use up to a state that will be kept."""
        if not prompts or not self._kept.capacity:
            return False
        kept = max(blocks_up_to_a_state(common_blocks(tokens, prompt), len(prompt)) for prompt in prompts)
        serials = [block.serial for block in self.prefix_cache.known(tokens)]
        return min(kept, self.prefix_cache.capacity) > self._kept.deepest(serials)[0]

    @override
    def cache_prefix(self, row: int, tokens: Sequence[int]) -> None:
        """Blocks are of use up to a state that is kept: the row's own, behind a whole block."""
        read = self.read[row]
        if read % BLOCK or not 0 < read <= len(tokens):
            return
        super().cache_prefix(row, tokens[:read])
        blocks = self.prefix_cache.known(tokens[:read])
        whole = len(blocks) * BLOCK == read  # A text may be longer than the pool.
        if whole and (slot := self._kept.add(blocks[-1].serial)) is not None:
            try:
                self.cache.save_state(row, slot)
            except BaseException:
                self._kept = KeptStates(self.cache.kept_states)  # It is unknown which of them were written.
                raise

    @override
    def swap(self, row: int, other: int) -> None:
        super().swap(row, other)
        self.read[row], self.read[other] = self.read[other], self.read[row]

    @override
    def rewind(self, row: int, length: int) -> None:
        """Behind what the states have read, the text is read again from its beginning."""
        if length < self.read[row]:
            self.read[row] = length = 0
        super().rewind(row, length)

    @override
    def end_round(self, row: int, length: int, read: int) -> None:
        super().end_round(row, length, read)
        self.read[row] = read

    @override
    def resize(self, rows: int, used: Sequence[int]) -> None:
        super().resize(rows, used)
        self.read = [*self.read[: len(used)], *[0] * (rows - len(used))]

    @override
    def begin(self, step: StateIndices, first: int, texts: RowIds, whole_blocks: bool = False) -> None:
        for row, text in enumerate(texts, first):
            if not self.lengths[row]:
                self.read[row] = 0
                self.cache.clear_states(row)
            step.state_indices[row - first] = self.read[row]
            end = len(text) - len(text) % BLOCK if whole_blocks else len(text)
            step.keep_indices[row - first] = self.read[row] = max(self.read[row], end)

    @override
    def next_chunk(self, token_ids: RowIds, first: int, max_tokens: int) -> list[Sequence[int]] | None:
        """A chunk ends where a state behind it may be kept, so that one is met on the way."""
        chunk = super().next_chunk(token_ids, first, max_tokens)
        if chunk is None:
            return None
        lengths = self.lengths[first : first + len(token_ids)]
        ends = [(length // TOKENS_OF_STATE + 1) * TOKENS_OF_STATE for length in lengths]
        return [tokens[:end] for tokens, end in zip(chunk, ends, strict=True)]


def rows_of(cache: RecurrentCache, graph: GraphInfo) -> CacheRows:
    """The rows of the cache of a model of ``graph``, which may keep nothing."""
    if graph.states:
        return RecurrentRows(cache)
    return (CacheRows if graph.own_tensors else NoCacheRows)(cache)
