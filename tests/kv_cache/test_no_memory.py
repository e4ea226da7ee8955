"""A newcomer for whom a cache cannot grow fails alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from tests.helpers.no_memory import check_newcomer_fails_alone


@pytest.mark.parametrize("scored", [False, True], ids=["plain", "scored"])
@pytest.mark.parametrize("steps", [1, 2, 4])
@pytest.mark.parametrize("which", [0, 1], ids=["target", "draft"])
def test_a_cache_that_cannot_grow(engines: Path, which: int, steps: int, scored: bool) -> None:
    config = DraftTargetConfig(3, reuse_blocks=False)
    with SpeculativeDecoder.open(engines / "target", engines / "draft", config) as decoder:
        check_newcomer_fails_alone(decoder, which, scored, steps)
