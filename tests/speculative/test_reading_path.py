"""The reading path of docs/architecture.md leads from a prompt to its text, and is short."""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path
from types import CodeType, FrameType

from specrun.config import DraftTargetConfig
from specrun.decoder import SpeculativeDecoder
from tests.helpers.other_tokenizers import KINDS, save_reader

ROOT = Path(__file__).parents[2]


def test_it_leads_where_it_says(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "architecture.md").read_text()
    (section,) = re.findall(r"^### Reading path\n(.*?)^## ", page, re.MULTILINE | re.DOTALL)
    path = re.findall(r"`([\w.]+)`", section[section.index("\n- ") :])
    assert len(path) > 20
    tokenizer = KINDS["bytes"]()
    save_reader(tmp_path / "target", tokenizer, max_draft_len=4)
    save_reader(tmp_path / "draft", tokenizer)
    calls: list[CodeType] = []

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            calls.append(frame.f_code)

    with SpeculativeDecoder.open(tmp_path / "target", tmp_path / "draft", DraftTargetConfig(3)) as decoder:
        sys.setprofile(note)
        try:
            (request,) = decoder.generate("the cat sat", max_output_len=12)
        finally:
            sys.setprofile(None)
    assert request.text and request.stats.accepted
    first_text = next(index for index, code in enumerate(calls) if code.co_qualname == path[-1])
    later, lines = iter(calls[: first_text + 1]), 0
    for name in path:
        function = next((code for code in later if code.co_qualname == name), None)
        assert function, f"{name} is not called after those before it"
        lines += len(inspect.getsourcelines(function)[0])
    assert lines <= 450
