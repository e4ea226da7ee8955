"""Times of passes that were measured when an engine was built."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

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
