"""The examples of docs/serving.md run."""

from __future__ import annotations

import re
from pathlib import Path

from specrun.decoder import SpeculativeDecoder
from specrun.text.tool_formats.hermes import HERMES
from tests.helpers.servers import running
from tests.helpers.tool_pairs import QWEN

PAGE = Path(__file__).parents[2] / "docs" / "serving.md"


def test_the_examples_of_the_page_run(long_pair: Path, tmp_path: Path) -> None:
    (tmp_path / "template").write_text(QWEN)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    decoder = SpeculativeDecoder.open(long_pair / "target", chat_template=tmp_path / "template", tool_format=HERMES)
    names: dict[str, object] = {}
    with running(decoder) as server:
        for block in blocks:
            exec(block.replace("http://127.0.0.1:8000", server.url), names)
    assert names["call"].function.name == "get_weather"  # type: ignore[attr-defined]
