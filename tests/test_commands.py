"""``specrun bench`` and ``specrun verify`` as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from click.testing import CliRunner, Result

from specrun.cli import main
from tests.tables import normal, save_table_engine
from tests.wrong import accepts_tokens_always


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def pair(engines: Path) -> tuple[object, ...]:
    return ("--engine_dir", engines / "target", "--draft_engine_dir", engines / "draft", "--input_text", "alpha beta")


def test_bench_prints_a_table_or_json(engines: Path) -> None:
    few = ("--output_len", 8, "--repetitions", 1, "--draft_len", 2, "--draft_len", "auto")
    shown = run("bench", *pair(engines), *few)
    assert shown.exit_code == 0, shown.output
    assert "speed-up" in shown.stdout
    assert "auto" in shown.stdout
    result = json.loads(run("bench", *pair(engines), *few, "--output_format", "json").stdout)
    assert [row["draft_len"] for row in result["results"]] == [2, None]


def test_verify_says_yes_and_shows_its_statistics(engines: Path) -> None:
    shown = run("verify", *pair(engines), "--seconds", 2, "--acceptance", "logits")
    assert shown.exit_code == 0, shown.output
    assert "chi-squared" in shown.stdout
    verdict = json.loads(run("verify", *pair(engines), "--seconds", 1, "--output_format", "json").stdout)
    assert verdict["good"]


def test_verify_exits_1_for_a_pair_that_differs(engines: Path, monkeypatch: object) -> None:
    monkeypatch.setattr("specrun.rounds.host.accept_tokens", accepts_tokens_always)
    shown = run("verify", *pair(engines), "--seconds", 1)
    assert shown.exit_code == 1
    assert "not" in shown.stdout


def test_mistakes_are_usage_errors(engines: Path, tmp_path: Path) -> None:
    for command in ("bench", "verify"):
        assert run(command, "--engine_dir", engines / "target").exit_code == 2
        assert run(command, *pair(engines), "--input_file", tmp_path).exit_code == 2
        said = run(command, *pair(engines), "--draft_len", "many")
        assert said.exit_code == 2
        assert "'many' is neither auto nor a number" in said.stderr


def test_a_draft_longer_than_the_target_takes_is_refused(tmp_path: Path) -> None:
    table = normal(1, 8, 8)
    target = save_table_engine(tmp_path / "target", table, max_draft_len=2)
    draft = save_table_engine(tmp_path / "draft", np.flip(table))
    flags = ("--engine_dir", target, "--draft_engine_dir", draft, "--input_text", "a", "--draft_len", 3)
    for command in ("bench", "verify"):
        assert run(command, *flags).exit_code == 1
