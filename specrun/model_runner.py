"""One model and its cache: feeds what the cache has not seen, and forgets by changing a number."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from specrun.backends import Backend
from specrun.sampling import Floats


class ModelRunner:
    """Owns ``lengths``: how many tokens of each row are in the model's cache. Everything else is derived.

    The same rule serves prompts, draft steps, verification and what follows a rejection: a call feeds
    ``tokens[lengths[row]:]`` of every row; ``rewind`` lowers a length and copies nothing.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.lengths: list[int] = []
        self.seconds = 0.0
        """Time spent in the engine since ``start``."""
        self.calls = 0
        self._room = 0

    @property
    def vocab_size(self) -> int:
        """Width of the logits."""
        return self.backend.config.graph.vocab_size

    def start(self, rows: int, length: int) -> None:
        """Begin a batch of ``rows`` rows that will hold at most ``length`` tokens, drafts included."""
        self._room = self.backend.allocate_cache(rows, length)
        self.lengths = [0] * rows
        self.seconds, self.calls = 0.0, 0

    def forward(self, rows: Sequence[Sequence[int]], keep: Sequence[int]) -> Floats:
        """Feed the tokens of each row that its cache lacks; return the logits after the last ``keep[row]`` of them.

        rows: the whole token sequence of each row; keep: how many positions' logits are wanted, at most as many as
        are fed. Returns [B, max(keep), V]; row r is valid up to keep[r]. The memory is reused by the next call.
        Long inputs go in pieces of at most max_input_len tokens; short rows wait for the last piece.
        """
        longest = max(len(tokens) - length for tokens, length in zip(rows, self.lengths, strict=True))
        piece = max(self.backend.config.build_config.max_input_len, *keep)
        for left in range((longest - 1) // piece, 0, -1):
            # Each row leaves whole pieces for later, so that its last tokens are fed in the last call.
            head = [tokens[: max(length, len(tokens) - left * piece)] for tokens, length in self._pairs(rows)]
            self._feed(head, [0] * len(rows))
        return self._feed(rows, keep)

    def rewind(self, row: int, length: int) -> None:
        """Keep only the first ``length`` tokens of ``row``."""
        self.lengths[row] = min(self.lengths[row], length)

    def _pairs(self, rows: Sequence[Sequence[int]]) -> list[tuple[Sequence[int], int]]:
        return list(zip(rows, self.lengths, strict=True))

    def _feed(self, rows: Sequence[Sequence[int]], keep: Sequence[int]) -> Floats:
        width = max(1, max(len(tokens) - length for tokens, length in self._pairs(rows)))
        input_ids = np.zeros((len(rows), width), np.int64)
        write_indices = np.empty(len(rows), np.int64)
        logits_indices = np.zeros((len(rows), max(1, *keep)), np.int64)
        for row, (tokens, length) in enumerate(self._pairs(rows)):
            # Padding writes too. Near the end of the cache a row starts earlier and writes what is already there.
            start = min(length, self._room - width)
            count = len(tokens) - start
            input_ids[row, :count] = tokens[start:]
            write_indices[row] = start
            if keep[row]:
                logits_indices[row, : keep[row]] = np.arange(count - keep[row], count)
        # A target with a padded embedding may commit ids that a draft without the padding has no row for.
        np.minimum(input_ids, self.vocab_size - 1, out=input_ids)
        began = time.perf_counter()
        logits = self.backend.run(input_ids, write_indices, logits_indices)
        self.seconds += time.perf_counter() - began
        self.calls += 1
        self.lengths = [len(tokens) for tokens in rows]
        return logits
