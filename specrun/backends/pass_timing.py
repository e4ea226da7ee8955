"""Times an engine's passes on this processor: see ``pass_times``."""

from __future__ import annotations

import time

import numpy as np

from specrun.backends import Backend
from specrun.engine_dir.pass_times import PassTimes

_POSITIONS, _MOST_POSITIONS = 256, 2048
"""Positions of a row's caches, as behind a short prompt and an answer, and of those of all rows."""
_ROWS = (1, 4, 16)
_MOST_TOKENS = 128
"""Tokens of a pass over all rows. Larger passes take long, and their times follow from these."""
_TIMED = 3
"""Passes of each size; the fastest counts, because other work only slows them down. One more comes first."""


def time_passes(backend: Backend) -> PassTimes:
    """Passes of a few rows, and of the tokens that rounds have. The cache is junk then."""
    build = backend.config.build_config
    tokens = sorted({1, 2, min(4, build.max_draft_len + 1), build.max_draft_len + 1})
    rows = sorted({min(count, build.max_batch_size) for count in _ROWS})
    rows = [count for count in rows if count == 1 or count * tokens[-1] <= _MOST_TOKENS]
    return PassTimes(
        rows=tuple(rows),
        tokens=tuple(tokens),
        seconds=tuple(tuple(_seconds(backend, batch, query_len) for query_len in tokens) for batch in rows),
    )


def _seconds(backend: Backend, batch: int, query_len: int) -> float:
    positions = min(_POSITIONS, _MOST_POSITIONS // batch, backend.config.build_config.cache_length)
    positions = max(positions, query_len)
    backend.resize(batch, positions, 0)
    step = backend.bind(0, batch, query_len, query_len)
    generator = np.random.default_rng(0)
    step.input_ids[...] = generator.integers(0, backend.config.graph.vocab_size, (batch, query_len))
    step.write_indices[...] = (positions - query_len) // 2
    step.logits_indices[...] = range(query_len)
    # As in a round: the first token stands, the others may be rejected.
    step.state_indices[...], step.keep_indices[...] = step.write_indices, step.write_indices + 1
    seconds = []
    for _ in range(1 + _TIMED):
        began = time.perf_counter()
        step.run()
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])
