"""Times an engine's passes on this processor: see ``pass_times``."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence

import numpy as np
from pydantic import JsonValue

from specrun.backends import Backend
from specrun.backends.known_here import describe_runtime, known_here
from specrun.engine_dir.config import BuildConfig
from specrun.engine_dir.pass_times import PassTimes, between

_POSITIONS, _MOST_POSITIONS = 256, 2048
"""Positions of a row's caches, as behind a short prompt and an answer, and of those of all rows."""
_ROWS = (1, 4, 16)
_MOST_TOKENS = 128
"""Tokens of a pass over several rows. Larger passes take long, and their times follow from these."""
_TURNS, _SECONDS = 16, 5.0
"""Passes of each size, and after how many seconds no further turn begins."""


def times_here(backend: Backend) -> PassTimes | None:
    """How long passes of an opened engine take on this machine. None: the engine was never timed.

    They are measured where the engine was timed on another machine, with other kernels or in fewer rows. The cache is
    junk then.
    """
    config = backend.config
    built, rows = config.pass_times, _rows(config.build_config)
    if built is None or (built.processor == describe_runtime(config) and built.rows == rows):
        return built
    what: list[JsonValue] = ["pass times", *rows]
    times, _ = known_here(config, what, lambda: time_passes(backend).model_dump(mode="json"), PassTimes.model_validate)
    return times


def time_passes(backend: Backend) -> PassTimes:
    """Passes of a few rows, and of the tokens that rounds have. The cache is junk then."""
    began = time.monotonic()
    build = backend.config.build_config
    tokens, rows = sorted({1, 2, min(4, build.max_draft_len + 1), build.max_draft_len + 1}), _rows(build)
    sizes = {batch: [size for size in tokens if batch == 1 or batch * size <= _MOST_TOKENS] for batch in rows}
    taken: list[list[float]] = []
    while not taken or (len(taken) < _TURNS and time.monotonic() - began < _SECONDS):
        taken.append([pass_seconds for batch in rows for pass_seconds in _seconds(backend, batch, sizes[batch])])
    # Other work only makes passes longer. The second shortest, because a machine may get slower within the first turn.
    measured = iter(np.sort(taken, axis=0)[min(1, len(taken) - 1)].tolist())
    seconds = []
    for batch in rows:
        batch_seconds = list(itertools.islice(measured, len(sizes[batch])))
        seconds.append([max(batch_seconds[0], between(sizes[batch], batch_seconds, size)) for size in tokens])
    runtime = describe_runtime(backend.config)
    return PassTimes(rows=rows, tokens=tuple(tokens), seconds=tuple(map(tuple, seconds)), processor=runtime)


def _rows(build: BuildConfig) -> tuple[int, ...]:
    """The rows of the passes that are timed."""
    return tuple(sorted({min(count, build.max_batch_size) for count in _ROWS}))


def _seconds(backend: Backend, batch: int, query_lens: Sequence[int]) -> list[float]:
    """The times of passes of so many tokens of a row each, behind a pass that pays for new memory."""
    positions = min(_POSITIONS, _MOST_POSITIONS // batch, backend.config.build_config.cache_length)
    positions = max(positions, *query_lens)
    backend.resize(batch, positions, 0)
    for tensor in backend.cache.part(0, batch):
        tensor[...] = 0  # What was there could be NaN in packed heads, and then tokens behind it cost nothing.
    generator, seconds = np.random.default_rng(0), []
    for query_len in (query_lens[-1], *query_lens):
        step = backend.bind(0, batch, query_len, query_len)
        step.input_ids[...] = generator.integers(0, backend.config.graph.vocab_size, (batch, query_len))
        step.write_indices[...] = (positions - query_len) // 2
        step.logits_indices[...] = range(query_len)
        # As in a round: the first token stands, the others may be rejected.
        step.state_indices[...], step.keep_indices[...] = step.write_indices, step.write_indices + 1
        began = time.perf_counter()
        step.run()
        seconds.append(time.perf_counter() - began)
    return seconds[1:]
