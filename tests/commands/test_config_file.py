"""``--config``: options in a file, for every command that opens models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from specrun.cli import main


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def file(engines: Path, tmp_path: Path) -> Path:
    """What ``specrun tune`` writes, and options of several commands."""
    made = tmp_path / "pair.yaml"
    made.write_text(
        f"target: {engines / 'target'}\ndraft_model: {engines / 'draft'}\ndraft_len: 3\nmax_batch_size: 2\n"
        "max_output_len: 5\noutput_len: 6\nrepetitions: 1\ninput_text: [the cat, a dog]\noutput_format: json\n"
        "seed: ~\nignore_eos: false\ndraft_model_device_list: [0]\n"
    )
    return made


def test_each_command_takes_its_own_options(file: Path, tmp_path: Path) -> None:
    said = run("generate", "--config", file)
    assert said.exit_code == 0, said.output
    lines = [json.loads(line) for line in said.stdout.splitlines()]
    assert [line["output_tokens"] for line in lines] == [5, 5]
    assert all(line["speculative_decoding"]["num_spec_tokens"] == 3 for line in lines)
    said = run("bench", "--config", file)
    assert said.exit_code == 0, said.output
    found = json.loads(said.stdout)
    assert [(row["draft_len"], row["ignore_eos"]) for row in found["results"]] == [(3, False)]
    assert found["settings"]["output_len"] == 6
    (tmp_path / "text").write_text("the cat sat on the mat")
    said = run("score", "--config", file, "--input_file", tmp_path / "text")
    assert said.exit_code == 0 and json.loads(said.stdout)["perplexity"] > 0, said.output


def test_the_command_line_comes_first(file: Path, engines: Path) -> None:
    said = run("generate", engines / "padded", "--config", file, "--max_output_len", 2, "--input_text", "fox")
    assert said.exit_code == 1 and "padded" in said.stderr, "another target, which has no room for drafts"
    said = run("generate", "--config", file, "--max_output_len", 2, "--input_text", "fox", "--draft_len", 1)
    (line,) = map(json.loads, said.stdout.splitlines())
    assert line["output_tokens"] == 2
    assert line["speculative_decoding"]["num_spec_tokens"] == 1


def test_threads_of_a_file_count(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECRUN_THREADS", "2")  # The command sets it; it is put back.
    file.write_text(file.read_text() + "threads: 0\n")
    said = run("generate", "--config", file)
    assert said.exit_code == 2 and "--threads" in said.stderr


@pytest.mark.parametrize(
    ("content", "status", "reason"),
    [
        ("drft_len: 3", 1, "no command has an option 'drft_len'; did you mean 'draft_len'?"),
        ("config: other.yaml", 1, "no command has an option 'config'"),
        ("draft_len: many", 2, "'many' is neither auto nor a number"),
        ("- a", 1, "expected settings (key: value), found list"),
        ("a: [", 1, "not readable YAML"),
        (None, 1, "no such file; --config wants a YAML file like tuned.yaml of specrun tune"),
    ],
)
def test_bad_files(tmp_path: Path, content: str | None, status: int, reason: str) -> None:
    if content is not None:
        (tmp_path / "file.yaml").write_text(content)
    said = run("generate", "--config", tmp_path / "file.yaml")
    assert (said.exit_code, reason in said.stderr) == (status, True), said.stderr
