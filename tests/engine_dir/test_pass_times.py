"""Times of passes that were measured when an engine was built."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from specrun.backends import Pass, open_host_backend, pass_timing
from specrun.backends.known_here import describe_runtime
from specrun.backends.pass_timing import time_passes, times_here
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


@pytest.mark.parametrize(("rows", "draft_len"), [(4, 6), (16, 10)])
@pytest.mark.parametrize(
    "slowness",
    [lambda index: 2 if index >= 3 else 1, lambda index: 2 if index >= 100 else 1, lambda index: 1 + index % 3],
    ids=["slower at once", "slower later", "beside other work"],
)
def test_a_machine_whose_speed_varies_changes_no_ratio(
    engines: Path, monkeypatch: pytest.MonkeyPatch, slowness: Callable[[int], int], rows: int, draft_len: int
) -> None:
    """On a clock of our own, a pass takes as long as it has tokens, times the slowness of the machine.

    Passes of 16 rows and 11 tokens take too long to be run. Their time follows from the others.
    """
    now = cost = 0.0
    calls = 0

    def clock() -> float:
        """Called before and after each pass."""
        nonlocal now, calls
        if calls % 2:
            now += cost * slowness(calls // 2)
        calls += 1
        return now

    monkeypatch.setattr("time.perf_counter", clock)
    with closing(open_host_backend(engines / "target", open_engine(engines / "target"), 0)) as backend:
        bind = backend.bind

        def timed_bind(first: int, num_rows: int, query_len: int, num_logits: int) -> Pass:
            nonlocal cost
            cost = num_rows * query_len
            assert cost <= 128
            return bind(first, num_rows, query_len, num_logits)

        monkeypatch.setattr(backend, "bind", timed_bind)
        sizes = {"max_batch_size": rows, "max_draft_len": draft_len}
        build = backend.config.build_config.model_copy(update=sizes)
        backend.config = backend.config.model_copy(update={"build_config": build})
        times = time_passes(backend)
    assert calls // 2 > 100
    assert (times.rows[-1], times.tokens[-1]) == (rows, draft_len + 1)
    expected = np.multiply.outer(times.rows, times.tokens)
    np.testing.assert_allclose(np.array(times.seconds) / times.seconds[0][0], expected)


def test_an_engine_from_another_machine_is_timed_here_once(
    engines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of times from elsewhere, not even the ratios need hold. What is kept but damaged is measured again."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = open_engine(engines / "target")
    assert config.pass_times
    assert config.pass_times.processor == describe_runtime(config)
    with closing(open_host_backend(engines / "target", config, 0)) as backend:
        monkeypatch.setattr(pass_timing, "time_passes", lambda _: TIMES)
        assert times_here(backend) == config.pass_times
        elsewhere = config.pass_times.model_copy(update={"processor": "Z80"})
        backend.config = config.model_copy(update={"pass_times": elsewhere})
        assert times_here(backend) == TIMES
        fewer = config.pass_times.model_copy(update={"rows": (1,), "seconds": config.pass_times.seconds[:1]})
        backend.config = config.model_copy(update={"pass_times": fewer})
        assert times_here(backend) == TIMES, "as engines of before were, whose batches are large"
        monkeypatch.delattr(pass_timing, "time_passes")
        assert times_here(backend) == TIMES
        kept = tmp_path / "specrun" / "probes.json"
        kept.write_text(kept.read_text().replace("1.2", "-1.2"))
        with pytest.raises(NameError, match="time_passes"):
            times_here(backend)
        backend.config = config.model_copy(update={"pass_times": None})
        assert times_here(backend) is None


def test_other_kernels_are_another_runtime(engines: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A compilation may change how fast our own operators are, and the order in which they add up."""
    config = open_engine(engines / "target")
    assert config.backend.needs_cpu_operators
    compiled = tmp_path / "compiled.so"
    compiled.write_bytes(b"other code")
    before = describe_runtime(config)
    monkeypatch.setattr("specrun.cpu_operators.library", lambda: compiled)
    assert describe_runtime(config) != before
    backend = config.backend.model_copy(update={"needs_cpu_operators": 0})
    assert "operators" not in describe_runtime(config.model_copy(update={"backend": backend}))
