"""Charts of a benchmark, as SVG for a page. Only this module needs matplotlib."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from specrun.evaluation.bench_results import Result, shown_draft_len
from specrun.evaluation.report.bandwidth import Share
from specrun.optional_packages import import_package

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DRAFT, TARGET, HOST, LIMIT = "#009e73", "#0072b2", "#999999", "#d55e00"
"""Colours of Okabe and Ito, which colour-blind people tell apart. Green is the draft's, as in a terminal."""
_LINES = (TARGET, LIMIT, DRAFT, "#cc79a7", "#e69f00", "#56b4e9")
_WIDTH, _ROW = 7.0, 0.34
"""Inches: of a chart, and of a row of bars."""


def speedup(results: Sequence[Result]) -> str:
    """Measured speed-ups by draft length, with their ranges over the repetitions; a line for each batch size."""
    lengths = list(dict.fromkeys(result.draft_len for result in results))
    lengths.sort(key=lambda length: (length is None, length or 0))
    figure, axes = _chart(3.2)
    sizes = list(dict.fromkeys(result.batch_size for result in results))
    for number, size in enumerate(sizes):
        of_size = sorted((r for r in results if r.batch_size == size), key=lambda r: lengths.index(r.draft_len))
        places = [lengths.index(r.draft_len) + 0.08 * (number - (len(sizes) - 1) / 2) for r in of_size]
        spreads = [r.speedup for r in of_size]
        ranges = [[s.median - s.lowest for s in spreads], [s.highest - s.median for s in spreads]]
        axes.errorbar(
            places,
            [s.median for s in spreads],
            ranges,
            label=f"batch {size}",
            color=_LINES[number % len(_LINES)],
            marker="o",
            capsize=4,
        )
    axes.axhline(1, color=HOST, linestyle="--", linewidth=1)
    axes.set_xticks(range(len(lengths)), [shown_draft_len(length) for length in lengths])
    axes.set_xlabel("draft length")
    axes.set_ylabel("speed-up")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    return _svg(figure, "speedup")


def predicted(results: Sequence[Result]) -> str:
    """Predicted speed-ups beside measured ones. Empty where rounds were not timed."""
    timed = [(r, r.split.predicted_speedup.median) for r in results if r.split]
    if not timed:
        return ""
    figure, axes = _chart(0.9 + 2 * _ROW * len(timed))
    positions = range(len(timed))
    for shift, values, colour, label in (
        (-0.2, [value for _, value in timed], HOST, "predicted"),
        (0.2, [r.speedup.median for r, _ in timed], DRAFT, "measured"),
    ):
        bars = axes.barh([position + shift for position in positions], values, 0.36, color=colour, label=label)
        axes.bar_label(bars, fmt="%.2f", padding=3)
    _rows(axes, [r for r, _ in timed])
    axes.axvline(1, color=HOST, linestyle="--", linewidth=1)
    axes.set_xlabel("speed-up")
    _legend_above(figure, axes)
    return _svg(figure, "predicted")


def positions(results: Sequence[Result]) -> str:
    """Acceptance rates of a round's first draft token, its second, ... Empty where nothing was drafted.

    Only of the first batch size: a text does not depend on the batch.
    """
    drafted = [r for r in _of_first_batch_size(results) if r.acceptance_by_position]
    if not drafted:
        return ""
    figure, axes = _chart(3.2)
    for number, r in enumerate(drafted):
        rates = [100 * rate for rate in r.acceptance_by_position]
        colour = _LINES[number % len(_LINES)]
        axes.plot(range(1, len(rates) + 1), rates, marker="o", color=colour, label=_name(r))
    axes.set_xticks(range(1, 1 + max(len(r.acceptance_by_position) for r in drafted)))
    axes.set_xlabel("position in the draft")
    axes.set_ylabel("accepted, % of evaluated")
    axes.set_ylim(0, 105)
    axes.legend(frameon=False)
    return _svg(figure, "positions")


def categories(results: Sequence[Result]) -> str:
    """Draft tokens accepted of those drafted, by category of prompts, of the first batch size.

    Empty where prompts have no categories.
    """
    categorized = [r for r in _of_first_batch_size(results) if r.by_category]
    names = sorted({name for r in categorized for name in r.by_category}, reverse=True)
    if not names:
        return ""
    figure, axes = _chart(0.9 + _ROW * len(names) * max(1, len(categorized) * 0.5))
    axes.margins(y=0.01)
    height = 0.8 / len(categorized)
    for number, r in enumerate(categorized):
        rates = [100 * r.by_category[name]["draft_acceptance_rate"] if name in r.by_category else 0 for name in names]
        positions = [position + height * ((len(categorized) - 1) / 2 - number) for position in range(len(names))]
        axes.barh(positions, rates, height * 0.9, color=_LINES[number % len(_LINES)], label=_name(r))
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("accepted, % of drafted")
    axes.set_xlim(0, 100)
    _legend_above(figure, axes)
    return _svg(figure, "categories")


def rounds(results: Sequence[Result]) -> str:
    """The time of a round: draft, verify and host. Empty where rounds were not timed."""
    timed = [(r, r.split) for r in results if r.split]
    if not timed:
        return ""
    figure, axes = _chart(0.9 + _ROW * len(timed) * 1.3)
    parts = (
        ("draft", DRAFT, [split.draft_ms.median for _, split in timed]),
        ("verify", TARGET, [split.verify_ms.median for _, split in timed]),
        ("host", HOST, [split.host_ms.median for _, split in timed]),
    )
    left = [0.0] * len(timed)
    for label, colour, values in parts:
        axes.barh(range(len(timed)), values, 0.6, left, color=colour, label=label)
        left = [before + value for before, value in zip(left, values, strict=True)]
    _rows(axes, [r for r, _ in timed])
    axes.set_xlabel("milliseconds a round")
    _legend_above(figure, axes)
    return _svg(figure, "rounds")


def bandwidth(shares: Sequence[Share]) -> str:
    """Bytes read a second, beside a probe that only reads. Empty where nothing was timed."""
    if not shares:
        return ""
    figure, axes = _chart(0.9 + _ROW * len(shares) * 1.3)
    bars = axes.barh(range(len(shares)), [row.bandwidth / 1e9 for row in shares], 0.6, color=TARGET)
    axes.bar_label(bars, [f"{row.share:.0%}" for row in shares], padding=3)
    axes.axvline(shares[0].limit / 1e9, color=LIMIT, linestyle="--", label="a probe that only reads")
    axes.set_yticks(range(len(shares)), [row.name for row in shares])
    axes.invert_yaxis()
    axes.set_xlabel("GB/s")
    _legend_above(figure, axes)
    return _svg(figure, "bandwidth")


def _of_first_batch_size(results: Sequence[Result]) -> list[Result]:
    return [result for result in results if result.batch_size == results[0].batch_size]


def _name(result: Result) -> str:
    return f"batch {result.batch_size}, draft length {shown_draft_len(result.draft_len)}"


def _rows(axes: Axes, results: Sequence[Result]) -> None:
    """Results from top to bottom."""
    axes.set_yticks(range(len(results)), [_name(result) for result in results])
    axes.invert_yaxis()
    axes.margins(x=0.1)


def _legend_above(figure: Figure, axes: Axes) -> None:
    handles, _ = axes.get_legend_handles_labels()
    figure.legend(loc="outside upper left", frameon=False, ncols=min(3, len(handles)))


def _chart(height: float) -> tuple[Figure, Axes]:
    """An empty chart. Raises ModuleNotFoundError without matplotlib."""
    figure: Figure = import_package("matplotlib.figure").Figure(figsize=(_WIDTH, height), layout="constrained")
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _svg(figure: Figure, name: str) -> str:
    """A chart as an element of a page. Its ids begin with ``name``: several charts may stand on one page."""
    matplotlib: Any = import_package("matplotlib")
    file = io.StringIO()
    # Text stays text; the same figures give the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name, "font.family": "sans-serif"}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = file.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    return re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
