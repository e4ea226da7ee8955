"""Docstrings of attributes, fields and constants are noun phrases, not fragments such as "Of one pass"."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted(path for package in ("specbuild", "specrun") for path in (ROOT / package).rglob("*.py"))
FRAGMENTS = {
    *("Among", "At", "Behind", "Beside", "By", "For", "From", "In", "Of", "On"),
    *("That", "To", "Where", "Whose", "With"),
}


def attribute_docstrings(source: str) -> Iterator[tuple[int, str]]:
    """The line and the text of each string below an assignment."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for assigned, text in itertools.pairwise(body):
            if not isinstance(assigned, ast.Assign | ast.AnnAssign):
                continue
            if (
                isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
                and isinstance(text.value.value, str)
            ):
                yield text.lineno, text.value.value


def fragments(source: str) -> list[tuple[int, str]]:
    """The attribute docstrings that begin with a preposition or a relative pronoun."""
    return [(line, text) for line, text in attribute_docstrings(source) if text.split()[0] in FRAGMENTS]


def test_attribute_docstrings_are_no_fragments() -> None:
    found = {
        f"{path.relative_to(ROOT)}:{line}": text
        for path in MODULES
        for line, text in fragments(path.read_text(encoding="utf-8"))
    }
    assert not found, "say what the value is, with its unit or shape: 'Number of predicted tokens.'"


def test_most_attribute_docstrings_are_found() -> None:
    assert sum(len([*attribute_docstrings(path.read_text(encoding="utf-8"))]) for path in MODULES) > 1000


@pytest.mark.parametrize(
    "source",
    [
        'A = 1\n"""Of one pass."""',
        'class A:\n    b: int\n    """By batch size."""',
        'class A:\n    def __init__(self) -> None:\n        self.b = 1\n        """That were predicted."""',
    ],
)
def test_fragments_are_found(source: str) -> None:
    assert len(fragments(source)) == 1


def test_noun_phrases_are_no_fragments() -> None:
    assert not fragments('A = 1\n"""Number of predicted tokens."""\n"""By itself."""')
