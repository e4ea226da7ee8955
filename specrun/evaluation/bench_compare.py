"""Two results of ``specrun bench`` side by side."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import TypeAdapter, ValidationError
from rich.console import Group

from specrun.errors import RequestError
from specrun.evaluation.bench_results import Result, Spread, shown_draft_len
from specrun.evaluation.bench_tables import csv_of, new_table
from specrun.request.prompts import read_text

_SPREADS = (
    *("tokens_per_second_alone", "tokens_per_second", "speedup", "first_token_ms_alone", "first_token_ms"),
    *("request_ms_alone", "request_ms"),
)
_NUMBERS = ("tokens_per_round", "acceptance_rate")
_Settings = dict[str, Any]


class Measured(NamedTuple):
    """A file of ``--output_format json``."""

    machine: _Settings
    settings: _Settings
    results: list[Result]


@dataclass(frozen=True)
class Row:
    """One figure of two results with the same batch size, draft length and kind of stops."""

    batch_size: int
    draft_len: int | None
    figure: str
    a: float
    b: float
    ratio: float | None
    """b / a; None where a is 0."""
    apart: bool | None
    """Whether the two ranges over the repetitions do not meet; None for a figure without a range."""


def read_results(path: Path) -> Measured:
    """The results that ``specrun bench --output_format json`` wrote. Raises RequestError for any other file."""
    text = read_text("--compare", path)
    try:
        document = json.loads(text)
        results = TypeAdapter(list[Result]).validate_python(document["results"])
        return Measured(dict(document["machine"]), dict(document["settings"]), results)
    except (ValueError, TypeError, KeyError, RecursionError, ValidationError) as error:
        raise RequestError(
            f"--compare: {path} is no result of specrun bench; make one with --output_format json"
        ) from error


def compare(a: Sequence[Result], b: Sequence[Result]) -> list[Row]:
    """The figures of all results that both have. Raises RequestError where there are none."""
    others = {_key(result): result for result in b}
    rows = [row for measured in a if (other := others.get(_key(measured))) for row in _rows(measured, other)]
    if not rows:
        raise RequestError("--compare: the files share no batch size with the same draft length and kind of stops")
    return rows


def differences(a: Measured, b: Measured) -> list[str]:
    """What else is different between the two, a line each."""
    said = []
    for name in ("machine", "settings"):
        ours, theirs = _flat(getattr(a, name)), _flat(getattr(b, name))
        for key in dict.fromkeys((*ours, *theirs)):
            if key not in ("date", "batch_sizes", "draft_lens") and ours.get(key) != theirs.get(key):
                said.append(f"{name}: {key} {ours.get(key)} and {theirs.get(key)}")
    for number, (this, other) in enumerate(((a, b), (b, a))):
        known = {_key(result) for result in other.results}
        for result in this.results:
            if _key(result) not in known:
                what = f"batch {result.batch_size}, draft_len {shown_draft_len(result.draft_len)}"
                stops = "" if result.ignore_eos else ", natural stops"
                said.append(f"only {'AB'[number]} has {what}{stops}{', again' if result.again else ''}")
    return said


def show(rows: Sequence[Row], output_format: Literal["table", "json", "csv"]) -> Group | str:
    """The rows for people, programs or spreadsheets."""
    if output_format == "json":
        return json.dumps({"rows": [asdict(row) for row in rows]}, indent=2)
    if output_format == "csv":
        return csv_of([asdict(row) | {"draft_len": shown_draft_len(row.draft_len)} for row in rows])
    shown = new_table("batch", "draft\nlen", "", "A", "B", "B / A", "")
    for row in rows:
        figures = (f"{row.a:.4g}", f"{row.b:.4g}", "-" if row.ratio is None else f"{row.ratio:.3f}")
        clear = "*" if row.apart else ""
        shown.add_row(str(row.batch_size), shown_draft_len(row.draft_len), row.figure, *figures, clear)
    return Group(shown, "", "*: the ranges over the repetitions do not meet.")


def _key(result: Result) -> tuple[int, int | None, bool, float | None, bool]:
    return result.batch_size, result.draft_len, result.ignore_eos, result.request_rate, result.again


def _rows(a: Result, b: Result) -> Iterator[Row]:
    for name in (*_SPREADS, *_NUMBERS):
        value, other = getattr(a, name), getattr(b, name)
        if value is None or other is None:
            continue
        apart = None
        if isinstance(value, Spread) and isinstance(other, Spread):
            apart = value.highest < other.lowest or other.highest < value.lowest
            value, other = value.median, other.median
        yield Row(a.batch_size, a.draft_len, name, value, other, other / value if value else None, apart)


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Without nesting: a machine has a backend, settings have sampling parameters."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value) if isinstance(value, Mapping) else {name: value}
    return flat
