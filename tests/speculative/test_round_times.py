"""What is expected of rounds by the passes that were timed when engines were built."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from specrun.decoder import SpeculativeDecoder
from specrun.engine_dir.config import open_engine
from specrun.engine_dir.pass_times import PassTimes
from specrun.speculative.round_times import expected_by_passes
from tests.helpers.told_rounds import text

TIMES = PassTimes(rows=(1, 4), tokens=(1, 2, 11), seconds=((1.0, 1.2, 3.0), (2.0, 2.4, 12.0)))


def test_a_round_verifies_and_drafts() -> None:
    draft = PassTimes(rows=(1,), tokens=(1, 2), seconds=((0.1, 0.15),))
    found = expected_by_passes(TIMES, draft, 1, 2)
    assert found.rounds == pytest.approx([1.0, 1.2 + 0.15, 1.4 + 0.15 + 0.1])
    assert found.draft_step == 0.1
    assert expected_by_passes(TIMES, None, 4, 1) == ([2.0, 2.4], 0.0)


def test_engines_are_timed_and_auto_begins_with_that(engines: Path, tmp_path: Path) -> None:
    """An engine of an earlier release has no times; then the first rounds tell."""
    target, draft = (open_engine(engines / name).pass_times for name in ("target", "draft"))
    assert target and draft
    assert (target.rows, target.tokens) == ((1, 4), (1, 2, 4, 11))
    assert draft.tokens == (1, 2)
    for timed in (True, False):
        for name, times in (("target", target), ("draft", draft)):
            shutil.rmtree(tmp_path / name, ignore_errors=True)
            shutil.copytree(engines / name, tmp_path / name)
            config = json.loads((tmp_path / name / "config.json").read_text())
            promising = [[1.0 if name == "target" else 1e-3 for _ in times.tokens] for _ in times.rows]
            config["pass_times"] = {**times.model_dump(), "seconds": promising} if timed else None
            (tmp_path / name / "config.json").write_text(json.dumps(config))
        with SpeculativeDecoder.open(tmp_path / "target", tmp_path / "draft") as decoder:
            assert bool(decoder.scheduler.lengths.choose([text()], [10]).draft_len) == timed
