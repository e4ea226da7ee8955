"""The page: charts, tables, and a text that shows who proposed it. It needs nothing from the network."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from specrun.engine_dir.config import EngineConfig
from specrun.evaluation.bench import as_json
from specrun.evaluation.bench_results import Result, shown_draft_len
from specrun.evaluation.bench_settings import BenchSettings
from specrun.evaluation.bench_tables import advice, lengths, novelty
from specrun.evaluation.report import charts
from specrun.evaluation.report.bandwidth import Share
from specrun.optional_packages import import_package

_TEMPLATE = Path(__file__).with_name("page.html")


class _Chart(NamedTuple):
    name: str
    title: str
    svg: str
    """Empty where there is nothing to draw."""
    caption: str


def require_packages() -> None:
    """Import what a report needs. Raises ModuleNotFoundError where it is not installed."""
    for package in ("matplotlib", "onnx_ir"):
        import_package(package)


def page(
    title: str,
    results: Sequence[Result],
    shares: Sequence[Share],
    target: EngineConfig,
    settings: BenchSettings,
) -> str:
    """The report as HTML. title: names of the models. shares: empty for GPUs."""
    jinja2: Any = import_package("jinja2")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    shown = max(results, key=lambda result: result.tokens_per_round)
    how = json.loads(as_json([], target, settings))
    html: str = environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        title=title,
        advice=advice(results),
        lengths=f"{novelty(results)} {lengths(results)}",
        results=results,
        charts=_charts(results, shares),
        shares=shares,
        example=shown.example,
        example_len=shown_draft_len(shown.draft_len),
        facts=[*_facts(how["machine"]), *_facts(how["settings"])],
    )
    return html


def _charts(results: Sequence[Result], shares: Sequence[Share]) -> list[_Chart]:
    return [
        _Chart(
            "speedup",
            "Speed-up by draft length",
            charts.speedup(results),
            "Bars: from the lowest to the highest of the repetitions. Dashed: the target alone.",
        ),
        _Chart(
            "positions",
            "Acceptance by position",
            charts.positions(results),
            "Of the draft tokens at a position that were evaluated: all before them had been accepted.",
        ),
        _Chart(
            "categories",
            "Acceptance by category",
            charts.categories(results),
            "Of all draft tokens for prompts of a category.",
        ),
        _Chart(
            "rounds",
            "Time of a round",
            charts.rounds(results),
            "In the draft, in the target, and outside both. Rounds that still read prompts are left out.",
        ),
        _Chart(
            "predicted",
            "Predicted and measured speed-up",
            charts.predicted(results),
            "Predicted by the acceptance rate and the times of both models (arXiv 2211.17192, theorem 3.8).",
        ),
        _Chart(
            "bandwidth",
            "Share of bandwidth",
            charts.bandwidth(shares),
            "Bytes of weights that passes read a second; per cent of a probe's. Models in the caches can exceed it.",
        ),
    ]


def _facts(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Names and values, without nesting and without what is not set."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _facts(value, f"{prefix}{name}.")
        elif value not in (None, [], ""):
            yield prefix + name, value
