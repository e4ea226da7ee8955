"""What a decoder is told of its rounds' times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

from specrun.request.request import Request
from specrun.scheduler.scheduler import Scheduler
from specrun.speculative.round import RoundResult


@contextmanager
def told_times(scheduler: Scheduler) -> Iterator[list[float | None]]:
    """The time of each round as the choice of draft lengths is told it; None where it counts for nothing."""
    times: list[float | None] = []
    observe = scheduler.lengths.observe

    def note(requests: Sequence[Request], result: RoundResult, num_uncached_draft: int = 0) -> None:
        times.append(result.seconds)
        observe(requests, result, num_uncached_draft)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler.lengths, "observe", note)
        yield times
