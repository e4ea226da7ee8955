"""Times an engine's passes on this processor: see ``pass_times``."""

from __future__ import annotations

import time

import numpy as np

from specrun.backends import Backend
from specrun.engine_dir.pass_times import PassTimes

_POSITIONS = 64
"""Positions of a cache are a multiple of this, as the runner has it."""
_MOST_TOKENS = 128
"""Tokens of a pass over all rows. Larger passes take long, and their times follow from these."""
_TIMED = 3
"""Passes of each size; the fastest counts, because other work only slows them down. One more comes first."""


def time_passes(backend: Backend) -> PassTimes:
    """Passes of 1, 4, 16, .. rows and of the tokens that rounds have. The cache is junk then."""
    build = backend.config.build_config
    tokens = sorted({1, 2, min(4, build.max_draft_len + 1), build.max_draft_len + 1})
    rows = [count for count in (1, 4, 16, 64, build.max_batch_size) if count <= build.max_batch_size]
    rows = [count for count in sorted(set(rows)) if count == 1 or count * tokens[-1] <= _MOST_TOKENS]
    return PassTimes(
        rows=tuple(rows),
        tokens=tuple(tokens),
        seconds=tuple(tuple(_seconds(backend, batch, query_len) for query_len in tokens) for batch in rows),
    )


def _seconds(backend: Backend, batch: int, query_len: int) -> float:
    backend.resize(batch, _POSITIONS, 0)
    step = backend.bind(0, batch, query_len, query_len)
    generator = np.random.default_rng(0)
    step.input_ids[...] = generator.integers(0, backend.config.graph.vocab_size, (batch, query_len))
    step.write_indices[...] = 0
    step.logits_indices[...] = range(query_len)
    seconds = []
    for _ in range(1 + _TIMED):
        began = time.perf_counter()
        step.run()
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])
