"""``specrun tune``: what it tries, and that its file runs what it found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from click.testing import Result as Said

from specrun.builder import BuildOptions
from specrun.cli import main
from specrun.devices.processor import THREADS, num_threads
from specrun.engine_dir.config import open_engine
from specrun.errors import RequestError
from specrun.evaluation.bench_results import Result, Spread
from specrun.evaluation.tune.candidates import Candidate, Space, draft_lens_up_to
from specrun.evaluation.tune.halving import Trial
from specrun.evaluation.tune.tune import Speeds, TuneSettings, as_options, space_of
from tests.helpers.tables import normal, save_table_engine


def run(*arguments: object) -> Said:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def test_every_combination_and_the_target_alone() -> None:
    space = Space(["small", "suffix"], ["auto", 2], [1, 4], ["auto", "int8"], [2])
    found = space.candidates()
    assert len(found) == len(set(found)) == 2 * 2 * 2 * 2 + 4
    assert [one.draft for one in found[:5]] == [*[None] * 4, "small"]
    first = [one for one in found if one.draft_len == "auto"]
    assert found[4:12] == first, "where time is short, these are measured"


@pytest.mark.parametrize("wrong", [{"draft_lens": []}, {"batch_sizes": [1, 1]}, {"threads": []}])
def test_lists_that_say_nothing(wrong: dict[str, Any]) -> None:
    usual: dict[str, Any] = {"drafts": [], "draft_lens": [1], "batch_sizes": [1], "qformats": ["auto"], "threads": [1]}
    with pytest.raises(RequestError, match=next(iter(wrong))):
        Space(**usual | wrong)


def test_usual_values_are_what_the_engines_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(THREADS, "6")
    sizes = ((5, 8), (10, 6))
    engines = [
        save_table_engine(tmp_path / str(length), normal(1, 8), max_draft_len=length, max_batch_size=rows)
        for length, rows in sizes
    ]
    space = space_of([open_engine(engine) for engine in engines], ["suffix"], TuneSettings())
    assert (space.draft_lens, space.batch_sizes, space.threads) == (["auto", 1, 2, 4], [1, 2, 4], [6, 3])
    given = TuneSettings(draft_lens=[3], batch_sizes=[2], threads=[5])
    space = space_of([open_engine(engines[0])], ["suffix"], given)
    assert (space.draft_lens, space.batch_sizes, space.threads) == ([3], [2], [5])
    assert draft_lens_up_to(0) == ["auto"]


def test_the_files_options_are_the_candidates(engines: Path, hf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(hf)
    build = BuildOptions(kv_cache_dtype="int8", revision="v1", lora="draft")
    best = Candidate("draft", 2, 1, "int8", num_threads() + 1)
    assert as_options(best, "target", build) == {
        "target": str(hf / "target"),
        "draft_model": str(hf / "draft"),
        "draft_len": 2,
        "qformat": "int8",
        "kv_cache_dtype": "int8",
        "max_batch_size": 1,
        "revision": "v1",
        "lora": str(hf / "draft"),
        "threads": num_threads() + 1,
    }
    best = Candidate("suffix", "auto", 4, "auto", num_threads())
    assert as_options(best, "owner/name", BuildOptions()) == {
        "target": "owner/name",
        "draft": "suffix",
        "draft_len": "auto",
    }
    alone = Candidate(None, 0, 2, "auto", num_threads())
    assert as_options(alone, engines / "target", BuildOptions()) == {"target": str(engines / "target")}


def test_a_machine_that_is_busy_for_a_while_does_not_decide() -> None:
    """The second draft is better, and is measured while the machine has half its speed."""
    speeds, trials = Speeds(), []
    for draft, alone, ratio in ((None, 100.0, 0.9), ("first", 110.0, 1.2), ("second", 50.0, 1.5)):
        one, pair = Spread(alone, alone, alone), Spread(alone * ratio, 0, 0)
        found = Result(1, 2, one, pair, Spread(ratio, ratio, ratio), one, one, 1.0, 0.5, [], 1.5, True, None)
        trials.append(Trial(Candidate(draft, 2, 1, "auto", 2), 0, found))
        speeds.add(trials[-1].candidate, found)
    assert [speeds.of(trial) for trial in trials] == pytest.approx([100, 120, 150])
    other = Trial(Candidate("first", 2, 4, "auto", 2), 0, trials[1].measured)
    speeds.add(other.candidate, other.measured)
    assert speeds.of(other) == pytest.approx(132), "of its own batch size"


def test_the_command_measures_and_its_file_runs(engines: Path, tmp_path: Path) -> None:
    few = ("--draft_len", 2, "--batch_size", 2, "--threads", 1, "--output_len", 6)
    file = tmp_path / "tuned.yaml"
    shared = (engines / "target", engines / "draft", "suffix", "--input_text", "the cat", "--output_file", file)
    said = run("tune", *shared, *few, "--temperature", 0.5, "--logit_bias", "13:-2.5")
    assert said.exit_code == 0, said.output
    lines = said.stdout.splitlines()
    assert max(map(len, lines)) <= 80 or str(file) in lines[-1]
    rows = [line.split() for line in lines[2:5]]
    assert {row[1] for row in rows} == {"alone", "draft", "suffix"}
    assert [row[0] for row in rows] == ["2", "2", "1"], "three candidates, then two"
    text = file.read_text()
    assert text.startswith("# ") and "# Fastest: " in text
    found = yaml.safe_load(text)
    assert found["target"] == str(engines / "target")
    best = rows[0][1]
    assert found.get("draft") == ("suffix" if best == "suffix" else None)
    assert found.get("draft_model") == (str(engines / "draft") if best == "draft" else None)
    written = run("generate", "--config", file, "--input_text", "the cat", "--output_format", "json")
    assert written.exit_code == 0, written.output
    assert json.loads(written.stdout)["speculative_decoding"]["num_spec_tokens"] == (0 if best == "alone" else 2)
    again = run("tune", *shared)
    assert again.exit_code == 1 and "exists; give --force to replace it" in again.stderr


def test_what_cannot_run_is_left_out(engines: Path, tmp_path: Path) -> None:
    few = ("--batch_size", 1, "--threads", 1, "--output_len", 4, "--input_text", "the cat")
    other = save_table_engine(tmp_path / "other", normal(1, 8, 8))
    file = ("--output_file", tmp_path / "tuned.yaml")
    said = run("tune", engines / "target", other, "--draft_len", 2, *few, *file)
    assert said.exit_code == 0, said.output
    assert "other, draft_len 2, batch 1, form auto, threads 1: left out: " in said.stderr
    assert "draft" not in yaml.safe_load((tmp_path / "tuned.yaml").read_text())


@pytest.mark.parametrize(
    ("options", "status", "reason"),
    [
        (("--time_limit", 0.01), 1, "--time_limit 0.01: nothing was measured in it; give more"),
        (("--qformat", "int8"), 2, "--qformat is for checkpoints"),
        (("--prompts", "builtin"), 2, "--prompts cannot be combined"),
        (("--input_text", " "), 1, "prompt 2: empty"),
        (("--output_file", "missing/tuned.yaml"), 1, "no such directory; make missing first"),
        (("--output_len", 5000), 1, "prompt 1: "),
    ],
)
def test_mistakes(
    engines: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: tuple[object, ...],
    status: int,
    reason: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    few = ("--draft_len", 2, "--batch_size", 1, "--threads", 1)
    file = ("--output_file", tmp_path / "tuned.yaml")
    said = run("tune", engines / "target", "suffix", "--input_text", "the cat", *few, *file, *options)
    assert (said.exit_code, reason in said.stderr) == (status, True), said.stderr
    assert not list(tmp_path.iterdir()), "nothing was written"
