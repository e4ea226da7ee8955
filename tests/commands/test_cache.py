"""``specrun cache``: what it lists, and what it removes."""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from specrun.cli import main
from specrun.engine_dir.directories import locked
from specrun.engine_dir.user_cache import entries

DAY = 86400


@pytest.fixture
def engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with engines of 1 and 2 MB, used today and 3 days ago, and a GGUF file's checkpoint of 4 MB."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    root = tmp_path / "specrun"
    for place, size, days in (("engines/one-01", 1, 0), ("engines/two-02", 2, 3), ("gguf/old-03", 4, 30)):
        (root / place / "engine").mkdir(parents=True)
        (root / place / "engine" / "model.onnx").write_bytes(bytes(size * 10**6))
        used = time.time() - days * DAY
        os.utime(root / place, (used, used))
    (root / "engines" / "checkpoints.json").write_text("{}")
    (root / "engines" / ".two-02.12345678.tmp").mkdir()
    return root / "engines"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["cache", *map(str, arguments)])


def names() -> list[str]:
    return [entry.name for entry in entries()]


def test_the_list_begins_with_what_was_used_last(engines: Path) -> None:
    said = run("list")
    assert [line.split() for line in said.stdout.splitlines()] == [
        ["name", "size", "last", "used"],
        ["one-01", "1.0", "MB", "today"],
        ["two-02", "2.0", "MB", "3", "days", "ago"],
        ["old-03", "4.0", "MB", "30", "days", "ago"],
    ]
    assert said.stderr == f"{engines.parent}: 3 directories, 7.0 MB\n"
    found = json.loads(run("list", "--json").stdout)
    assert [(one["name"], one["bytes"]) for one in found] == [("one-01", 10**6), ("two-02", 2 * 10**6), ("old-03", 4e6)]


def test_an_empty_cache_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    said = run("list")
    assert (said.exit_code, said.stdout, "0 directories, 0 B" in said.stderr) == (0, "", True)
    assert run("list", "--json").stdout == "[]\n"


def test_engines_are_removed_by_name_or_its_beginning(engines: Path) -> None:
    said = run("remove", "tw")
    assert (said.exit_code, said.stderr) == (0, "removed two-02\nremoved 1 directories, 2.0 MB\n")
    assert names() == ["one-01", "old-03"]
    assert not list(engines.glob("*removed*"))
    said = run("remove", "one-01", "none")
    assert (said.exit_code, "none: not in the cache" in said.stderr) == (2, True)
    assert names() == ["one-01", "old-03"], "nothing is removed where one name is wrong"


@pytest.mark.parametrize(
    ("limits", "left"),
    [
        (["--max_size", "3MB"], ["one-01", "two-02"]),
        (["--max_size", "2.5 mb"], ["one-01"]),
        (["--max_size", "0"], []),
        (["--older_than", 2], ["one-01"]),
        (["--older_than", 2, "--max_size", "1GB"], ["one-01"]),
        (["--older_than", 100], ["one-01", "two-02", "old-03"]),
    ],
)
def test_pruning_keeps_what_was_used_last(engines: Path, limits: list[object], left: list[str]) -> None:
    assert run("prune", *limits).exit_code == 0
    assert names() == left


@pytest.mark.parametrize(
    ("limits", "reason"), [([], "give --max_size or"), (["--max_size", "5 apples"], "a size like")]
)
def test_pruning_needs_a_limit(engines: Path, limits: list[str], reason: str) -> None:
    said = run("prune", *limits)
    assert (said.exit_code, reason in said.stderr) == (2, True), said.stderr


def test_an_engine_that_is_being_built_stays(engines: Path) -> None:
    built = threading.Event()

    def build() -> None:
        with locked(engines / "one-01"):
            built.wait(60)

    builder = threading.Thread(target=build)
    builder.start()
    try:
        while not (engines / "one-01.lock").exists():
            time.sleep(0.01)
        said = run("remove", "one-01")
    finally:
        built.set()
        builder.join()
    assert (said.exit_code, "another process is building it" in said.stderr) == (1, True), said.stderr
    assert "one-01" in names()
