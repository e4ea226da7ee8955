"""Two results side by side: rows are matched, ratios are B's over A's, and what else differs is said."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from specrun.cli import main
from specrun.errors import RequestError
from specrun.evaluation.bench_compare import Measured, compare, differences, read_results
from specrun.evaluation.bench_results import Result, Spread

ONE = Spread(1, 1, 1)


def result(batch: int, draft_len: int | None, speed: Spread, rate: float | None = 0.5) -> Result:
    return Result(batch, draft_len, ONE, speed, ONE, ONE, ONE, 1.0, rate, [], 1.5, True, None)


A = [result(1, 4, Spread(10, 9, 11)), result(1, None, Spread(12, 11, 13)), result(4, 4, Spread(20, 19, 21))]
B = [result(1, None, Spread(18, 12.5, 19), 0.0), result(1, 4, Spread(5, 4, 6), None), result(8, 4, ONE)]


def test_rows_are_matched_and_ratios_are_b_over_a() -> None:
    rows = compare(A, B)
    speeds = [row for row in rows if row.figure == "tokens_per_second"]
    assert [(row.batch_size, row.draft_len, row.a, row.b, row.ratio, row.apart) for row in speeds] == [
        (1, 4, 10, 5, 0.5, True),
        (1, None, 12, 18, 1.5, False),
    ]
    assert [row.draft_len for row in rows if row.figure == "acceptance_rate"] == [None], "nothing drafted, no rate"
    backwards = [row.ratio for row in compare(B, A) if row.figure == "acceptance_rate"]
    assert backwards == [None], "nothing is a multiple of 0"


def test_natural_stops_are_no_match_for_fixed_lengths() -> None:
    with pytest.raises(RequestError, match="share no batch size with the same draft length and kind of stops"):
        compare(A, [replace(one, ignore_eos=False) for one in A])


def test_what_else_differs_is_said() -> None:
    a = Measured({"cores": 2, "date": "x"}, {"output_len": 8, "params": {"seed": 1}}, A)
    b = Measured({"cores": 4, "date": "y"}, {"output_len": 8, "params": {"seed": 2}}, B)
    assert differences(a, b) == [
        "machine: cores 2 and 4",
        "settings: seed 1 and 2",
        "only A has batch 4, draft_len 4",
        "only B has batch 8, draft_len 4",
    ]


def test_the_command_reads_what_bench_writes(engines: Path, tmp_path: Path) -> None:
    pair = ["bench", str(engines / "target"), str(engines / "draft"), "--input_text", "the cat", "--repetitions", "1"]
    shared = [*pair, "--output_len", "6", "--output_format", "json"]
    for name, options in (("a", ["--draft_len", "2"]), ("b", ["--draft_len", "2", "--draft_len", "3"])):
        (tmp_path / name).write_text(CliRunner().invoke(main, [*shared, *options]).stdout)
    compared = ["bench", "--compare", str(tmp_path / "a"), str(tmp_path / "b")]
    said = CliRunner().invoke(main, compared)
    assert said.exit_code == 0, said.output
    assert "note: only B has batch 1, draft_len 3" in said.stderr
    assert "speedup" in said.stdout and max(map(len, said.stdout.splitlines())) <= 80
    rows = json.loads(CliRunner().invoke(main, [*compared, "--output_format", "json"]).stdout)["rows"]
    speedups = [read_results(tmp_path / name).results[0].speedup.median for name in "ab"]
    (row,) = (row for row in rows if row["figure"] == "speedup")
    assert (row["a"], row["b"], row["ratio"]) == (*speedups, pytest.approx(speedups[1] / speedups[0]))
    table = CliRunner().invoke(main, [*compared, "--output_format", "csv"]).stdout
    ratios = [float(line["ratio"]) if line["ratio"] else None for line in csv.DictReader(io.StringIO(table))]
    assert ratios == [row["ratio"] for row in rows]


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"machine": {}, "settings": {}, "results": [1]}', None])
def test_files_of_something_else(tmp_path: Path, content: str | None) -> None:
    good = tmp_path / "good"
    good.write_text(json.dumps({"machine": {}, "settings": {}, "results": [asdict(one) for one in A]}))
    assert read_results(good).results == A
    if content is not None:
        (tmp_path / "other").write_text(content)
    said = CliRunner().invoke(main, ["bench", "--compare", str(good), str(tmp_path / "other")])
    assert said.exit_code == 1
    assert said.stderr.count("\n") == 1 and "--compare: " in said.stderr


@pytest.mark.parametrize("more", [["target"], ["--draft_len", "3"], ["--input_text", "a"]])
def test_nothing_is_measured_beside_it(tmp_path: Path, more: list[str]) -> None:
    said = CliRunner().invoke(main, ["bench", "--compare", "a.json", "b.json", *more])
    assert said.exit_code == 2
    assert f"it cannot be combined with {more[0] if more[0][0] == '-' else 'TARGET'}" in said.stderr
