"""``specrun bench --report``: the page has every part, its figures are the results', and it loads nothing."""

from __future__ import annotations

import math
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file

from specrun.cli import main
from specrun.engine_dir.config import EngineConfig
from specrun.evaluation.bench_results import Example, Result, Split, Spread
from specrun.evaluation.bench_settings import BenchSettings
from specrun.evaluation.report.bandwidth import Share, shares, weight_bytes, weight_bytes_of
from specrun.evaluation.report.page import page
from specrun.request.stats import Stats, speculative_decoding
from tests.helpers.tables import table_config

SECTIONS = (
    *("results", "speedup", "positions", "categories", "rounds", "predicted", "bandwidth", "shares", "text", "how"),
)


class Page(HTMLParser):
    """Ids of sections, charts of each, references, the marked text, and all text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.sections: list[str] = []
        self.charts: dict[str, int] = {}
        self.references: list[str] = []
        self.ids: list[str] = []
        self.tags: set[str] = set()
        self.marked = ""
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.add(tag)
        self._open.append(tag)
        if tag in ("td", "th", "text"):
            self.text += " "
        if name := values.get("id"):
            self.ids.append(name)
            if tag == "section":
                self.sections.append(name)
        if tag == "svg":
            self.charts[self.sections[-1]] = self.charts.get(self.sections[-1], 0) + 1
        named = ("src", "href", "xlink:href", "srcset", "data")
        self.references += [value for name in named if (value := values.get(name))]

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        self.text += data
        if "mark" in self._open and "div" in self._open:
            self.marked += data


def spread(middle: float) -> Spread:
    return Spread(middle, middle * 0.9, middle * 1.1)


def result(batch: int, draft_len: int | None, speedup: float) -> Result:
    stats = Stats(rounds=3, drafted=6, evaluated=5, accepted=3, max_draft_len=2)
    stats.steps += [(2, 1)] * 3
    counts = speculative_decoding([stats])
    split = Split(*map(spread, (2.0, 4.0, 1.0, 0.1, 4.0, 0.5, speedup * 1.1)))
    one = spread(10)
    made = Result(
        batch, draft_len, one, spread(10 * speedup), spread(speedup), one, one, 2.0, 0.6, [0.7, 0.4], 2.0, True, split
    )
    pieces = [("a <b>", True), (" & c", False)]
    return replace(made, by_category={"coding": counts, "qa": counts}, example=Example("prompt <script>", pieces))


RESULTS = [result(size, length, speedup) for size in (1, 4) for length, speedup in ((2, 1.25), (None, 1.75))]
SHARES = [Share("target, a step alone", 8_000_000, 4.0, 4e9), Share("draft, a step", 1_000_000, 0.5, 4e9)]
ENGINE: EngineConfig = table_config(8)


def test_the_page_has_every_part_and_loads_nothing() -> None:
    html = page("big with small", RESULTS, SHARES, ENGINE, BenchSettings())
    found = Page(html)
    assert tuple(found.sections) == SECTIONS
    charts = ("speedup", "positions", "categories", "rounds", "predicted", "bandwidth")
    assert found.charts == dict.fromkeys(charts, 1)
    assert all(reference.startswith("#") for reference in found.references), "inside the page"
    assert {reference[1:] for reference in found.references} <= set(found.ids)
    assert len(found.ids) == len(set(found.ids)), "of all charts"
    assert not found.tags & {"script", "link", "img", "iframe"}
    assert "url(" not in html.replace("url(#", "")


def test_the_figures_are_the_results() -> None:
    found = Page(page("big with small", RESULTS, SHARES, ENGINE, BenchSettings(output_len=77)))
    words = found.text.split()
    for row in RESULTS:
        assert f"{row.speedup.median:.2f}" in words and f"{row.tokens_per_second.median:.1f}" in words
    assert "Batch 4: the draft pays, 1.75x with --draft_len auto." in found.text
    assert words.count("50%") == 2, "2 GB/s of the probe's 4, in the chart"
    for name in ("coding", "qa", "output_len", "77"):
        assert name in words


def test_texts_are_escaped_and_the_drafts_part_is_marked() -> None:
    html = page("<i>big</i>", RESULTS, [], ENGINE, BenchSettings())
    found = Page(html)
    assert found.marked == "a <b>"
    assert "prompt <script>a <b> & c" in found.text
    assert not {"script", "b", "i"} & found.tags


def test_what_was_not_measured_is_left_out() -> None:
    """As on a GPU, without categories, without a tokenizer, and where nothing was drafted."""
    bare = replace(
        RESULTS[0], split=None, by_category={}, example=None, acceptance_by_position=[], acceptance_rate=None
    )
    found = Page(page("a", [bare], [], ENGINE, BenchSettings()))
    assert found.sections == ["results", "speedup", "how"]


def test_the_same_results_give_the_same_charts() -> None:
    pages = [page("a", RESULTS, SHARES, ENGINE, BenchSettings()) for _ in range(2)]
    one, other = (html[: html.index('id="how"')] for html in pages)
    assert one == other


def test_the_bytes_of_a_pass_are_those_of_the_weights(engines: Path, hf: Path) -> None:
    weights = load_file(hf / "target" / "model.safetensors")
    embedding = "model.embed_tokens.weight"
    tied = "lm_head.weight" not in weights
    expected = sum(4 * weight.size for name, weight in weights.items() if name != embedding or tied)
    assert weight_bytes_of(engines / "target") == pytest.approx(expected, rel=0.05), "beside tables of positions"


def test_a_table_of_which_rows_are_read_does_not_count() -> None:
    table, weight = (ir.tensor(np.ones((100, 4), np.float32), name=name) for name in ("table", "weight"))
    values = [ir.Value(name=t.name, const_value=t, type=ir.TensorType(t.dtype)) for t in (table, weight)]
    ids, x = ir.Value(name="ids"), ir.Value(name="x")
    nodes = [ir.node("Gather", [values[0], ids]), ir.node("MatMul", [x, values[1]]), ir.node("Neg", [values[1]])]
    graph = ir.Graph([ids, x], [], nodes=nodes, initializers=values)
    assert weight_bytes(graph) == 1600, "the weight once"


def test_shares_are_of_the_passes_that_were_timed() -> None:
    one = SHARES[0]
    assert (one.bandwidth, one.share) == (2e9, 0.5)
    assert shares(Path("target"), None, [replace(RESULTS[0], split=None)]) == []


def run(*arguments: object) -> tuple[int, str]:
    said = CliRunner().invoke(main, [str(argument) for argument in arguments])
    return said.exit_code, said.stderr


def test_the_command_writes_it(engines: Path, tmp_path: Path) -> None:
    (tmp_path / "set").write_text('{"prompt": "the cat", "category": "animals"}')
    pair = (engines / "target", engines / "draft", "--prompts", tmp_path / "set")
    few = ("--output_len", 8, "--repetitions", 1, "--draft_len", 3)
    status, said = run("bench", *pair, *few, "--report", tmp_path / "page.html")
    assert status == 0, said
    found = Page((tmp_path / "page.html").read_text())
    assert tuple(found.sections) == SECTIONS
    assert "target with draft" in found.text and "animals" in found.text
    bytes_read = weight_bytes_of(engines / "target") / 1e6
    assert f"{bytes_read:.1f}" in found.text and math.isfinite(bytes_read)


def test_what_would_fail_at_the_end_is_said_at_the_start(engines: Path, tmp_path: Path) -> None:
    pair = (engines / "target", engines / "draft", "--input_text", "a")
    for file in (tmp_path, tmp_path / "missing" / "page.html"):
        status, said = run("bench", *pair, "--report", file)
        assert (status, said.count("\n")) == (1, 1)
        assert "expected a file in a directory that exists" in said
    flags = ["bench", *map(str, pair), "--report", str(tmp_path / "page.html")]
    code = f"import sys; sys.modules['matplotlib'] = None; from specrun.cli import main; main({flags!r})"
    lacking = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert lacking.returncode == 1
    (line,) = lacking.stderr.splitlines()
    assert "bench needs matplotlib, which is not installed: pip install '.[build]' in a clone" in line
