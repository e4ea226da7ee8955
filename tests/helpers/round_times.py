"""What a decoder is told of its rounds' times."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from specrun.scheduler.scheduler import Scheduler


@contextmanager
def told_times(scheduler: Scheduler) -> Iterator[list[float | None]]:
    """The time of each round as the choice of draft lengths is told it; None where it counts for nothing."""
    times: list[float | None] = []
    observe = scheduler.lengths.observe

    def note(draft_len: float, seconds: float | None, *rest: Any) -> None:
        times.append(seconds)
        observe(draft_len, seconds, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler.lengths, "observe", note)
        yield times
