"""docs/python.md: its examples run, and its tables are the classes' own."""

from __future__ import annotations

import ast
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from specrun import DraftTargetConfig, RequestOptions, SamplingParams

PAGE = Path(__file__).parent.parent / "docs" / "python.md"


def test_the_examples_run(engines: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "engines").symlink_to(engines)
    monkeypatch.chdir(tmp_path)
    text = PAGE.read_text()
    names: dict[str, Any] = {}
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL))
    assert len(blocks) > 8
    for block in blocks:
        line = text[: block.start(1)].count("\n")
        exec(compile("\n" * line + block[1], str(PAGE), "exec"), names)
    assert names["good"].output


@pytest.mark.parametrize("settings", [DraftTargetConfig, RequestOptions, SamplingParams])
def test_the_tables_are_complete(settings: Any) -> None:
    table = re.search(rf"^\| `{settings.__name__}` \|.*?\n\n", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert table
    written: dict[str, Any] = {}
    for names, default in re.findall(r"^\| (`.*?`) \| `(.*?)` \|", table[0], re.MULTILINE):
        written |= dict.fromkeys(re.findall(r"`(\w+)`", names), ast.literal_eval(default))
    usual = settings()
    assert written == {field.name: getattr(usual, field.name) for field in fields(settings)}
