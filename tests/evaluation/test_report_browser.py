"""The page of ``specrun bench --report`` in a browser: everything is drawn, nothing sticks out, nothing is loaded."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from specrun.evaluation.bench_settings import BenchSettings
from specrun.evaluation.report.page import page
from tests.evaluation.test_report import ENGINE, RESULTS, SHARES

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [
    pytest.mark.slow("the page's structure: evaluation/test_report.py"),
    pytest.mark.skipif(BROWSER is None, reason="no Chromium here; apt-get install chromium brings one"),
]

LOOK = """<script>addEventListener("load", () => {
  const box = (element) => { const r = element.getBoundingClientRect(); return [r.left, r.width, r.height]; };
  const seen = {
    charts: [...document.querySelectorAll("svg")].map(box),
    labels: [...document.querySelectorAll("svg text")].map(box),
    marked: [...document.querySelectorAll(".text mark")].map((one) => getComputedStyle(one).backgroundColor),
    loaded: performance.getEntriesByType("resource").length,
    width: [document.documentElement.scrollWidth, document.documentElement.clientWidth],
  };
  document.body.dataset.seen = JSON.stringify(seen);
});</script></body>"""


def look(directory: Path, width: int) -> dict[str, Any]:
    """What a browser with a window of this width makes of the page."""
    made = page("big with small", RESULTS, SHARES, ENGINE, BenchSettings())
    (directory / "page.html").write_text(made.replace("</body>", LOOK))
    options = ("--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={directory / 'profile'}")
    command = [str(BROWSER), *options, f"--window-size={width},900", "--dump-dom", str(directory / "page.html")]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    seen = re.search(r'data-seen="(.*?)"', said.stdout)
    assert seen, said.stdout[-500:]
    found: dict[str, Any] = json.loads(html.unescape(seen[1]))
    return found


@pytest.mark.parametrize("width", [1200, 520])
def test_everything_is_drawn_and_nothing_sticks_out(tmp_path: Path, width: int) -> None:
    seen = look(tmp_path, width)
    assert len(seen["charts"]) == 6
    scroll, client = seen["width"]
    assert scroll <= client, "wide tables scroll by themselves"
    for left, wide, high in seen["charts"]:
        assert wide > 0.8 * min(client, 830) and high > 40 and left >= 0
    assert len(seen["labels"]) > 40 and all(wide > 0 and high > 0 for _, wide, high in seen["labels"])
    assert seen["marked"] == ["rgb(201, 239, 226)"]
    assert seen["loaded"] == 0
