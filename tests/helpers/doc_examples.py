"""The examples of a page: its commands, which are indented by four spaces, and its fenced blocks."""

from __future__ import annotations

import re
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

_PATTERN = re.compile(
    r"^#+ (?P<heading>.+)$"
    r"|^```(?P<language>\w+)\n(?P<fenced>(?s:.*?))^```$"
    r"|^ {4}(?P<command>\S(?:.*\\\n)*.*)$",  # It goes on behind a backslash.
    re.MULTILINE,
)


class Example(NamedTuple):
    """A command, whose lines are joined, or a fenced block."""

    line: int
    language: str
    """``bash`` for commands; else what the fence says."""
    text: str


class Section(NamedTuple):
    """What stands under a heading of any level."""

    title: str
    examples: list[Example]


def sections(page: Path) -> list[Section]:
    """Those of a page that have examples, from its top to its end."""
    text, heading = page.read_text(), ""
    found: list[tuple[str, Example]] = []
    for match in _PATTERN.finditer(text):
        if match["heading"]:
            heading = match["heading"]
            continue
        command = match["command"] and match["command"].replace("\\\n", " ")
        language, content = ("bash", command) if command else (match["language"], match["fenced"])
        found.append((heading, Example(text.count("\n", 0, match.start()) + 1, language, content)))
    return [Section(title, [each for _, each in group]) for title, group in groupby(found, lambda pair: pair[0])]
