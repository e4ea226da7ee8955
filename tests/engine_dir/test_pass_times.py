"""Times of passes that were measured when an engine was built."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from specrun.backends import Pass, open_host_backend
from specrun.backends.pass_timing import time_passes
from specrun.engine_dir.config import open_engine
from specrun.engine_dir.pass_times import PassTimes

TIMES = PassTimes(rows=(1, 4), tokens=(1, 2, 11), seconds=((1.0, 1.2, 3.0), (2.0, 2.4, 12.0)))


@pytest.mark.parametrize(
    ("rows", "tokens", "seconds"),
    [(1, 1, 1.0), (4, 11, 12.0), (1, 5, 1.8), (2, 1, 1 + 1 / 3), (3, 2, 2.0), (7, 1, 3.0), (1, 20, 4.8)],
)
def test_between_what_was_measured(rows: int, tokens: int, seconds: float) -> None:
    assert TIMES.of(rows, tokens) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows": [4, 1]},
        {"rows": [0, 1]},
        {"seconds": [[1, 1, 1]]},
        {"seconds": [[1, 1], [1, 1]]},
        {"seconds": [[1, 1, 0], [1, 1, 1]]},
    ],
)
def test_what_is_no_table_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        PassTimes.model_validate({**TIMES.model_dump(), **wrong})


@pytest.mark.parametrize("slow_from", [3, 8, 13, 25])
def test_a_machine_that_gets_slower_meanwhile_changes_no_ratio(
    engines: Path, monkeypatch: pytest.MonkeyPatch, slow_from: int
) -> None:
    """On a clock of our own, a pass takes as long as it has tokens, and twice as long from some pass on."""
    now = cost = 0.0
    calls = 0

    def clock() -> float:
        """Called before and after each pass."""
        nonlocal now, calls
        if calls % 2:
            now += cost * (2 if calls // 2 >= slow_from else 1)
        calls += 1
        return now

    monkeypatch.setattr("time.perf_counter", clock)
    with closing(open_host_backend(engines / "target", open_engine(engines / "target"), 0)) as backend:
        bind = backend.bind

        def timed_bind(first: int, num_rows: int, query_len: int, num_logits: int) -> Pass:
            nonlocal cost
            cost = num_rows * query_len
            return bind(first, num_rows, query_len, num_logits)

        monkeypatch.setattr(backend, "bind", timed_bind)
        times = time_passes(backend)
    assert calls // 2 > slow_from
    expected = np.multiply.outer(times.rows, times.tokens)
    np.testing.assert_allclose(np.array(times.seconds) / times.seconds[0][0], expected)
