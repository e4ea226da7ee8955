"""Writes the lists of options in docs/python.md: names, defaults and docstrings of the dataclasses' fields.

.venv/bin/python scripts/field_lists.py
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import fields
from pathlib import Path
from typing import Any

import specrun
from specrun.field_options import docstrings

PAGE = Path(__file__).parents[1] / "docs" / "python.md"
_LIST = re.compile(r"(<!-- fields of (\w+) -->\n\n).*?(?=\n\n)", re.DOTALL)


def field_list(owner: Any) -> str:
    """A line of Markdown, or several, for each field of a dataclass whose fields have defaults."""
    usual, texts = owner(), docstrings(owner)
    return "\n".join(
        textwrap.fill(
            f"- `{field.name}`, `{getattr(usual, field.name)!r}`: {' '.join(texts[field.name].split())}".replace(
                "``", "`"
            ),
            width=120,
            subsequent_indent="  ",
            break_on_hyphens=False,
        )
        for field in fields(owner)
    )


def updated(text: str) -> str:
    """``text`` with a new list behind each comment that names a class."""
    return _LIST.sub(lambda found: found[1] + field_list(getattr(specrun, found[2])), text)


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
