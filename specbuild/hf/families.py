"""Which families of transformers convert: a table that scripts/make_families.py writes by trying all of them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("families.json")

_SAID = {
    "refused": "refused",
    "depends": "convert where their configuration asks for keys and values alone; their defaults do not",
    "failed": "failed",
    "not tried": "not tried",
}
"""What ``describe_families`` says of those that were not converted."""


@cache
def table() -> dict[str, Any]:
    """``transformers``: the version that was tried. ``families``: by model type, the outcome and, mostly, its reason.

    Outcomes: converts (verified against the model), refused, depends (refused for the kinds of layers that the family's
    default configuration has, which a checkpoint's own says), failed, not tried (no small model could be made).
    """
    found: dict[str, Any] = json.loads(TABLE.read_text())
    return found


def refused_family(model_type: str) -> str | None:
    """Why no model of a family converts; None where some do, or nobody knows."""
    found = table()["families"].get(model_type, {})
    return str(found["reason"]) if found.get("outcome") == "refused" else None


def describe_families() -> str:
    """The table for people."""
    found = table()
    lines = [f"Causal language models of transformers {found['transformers']}:", ""]
    by_outcome: dict[str, list[str]] = {}
    for name, one in found["families"].items():
        by_outcome.setdefault(one["outcome"], []).append(name)
    converts = by_outcome["converts"]
    lines.append(f"{len(converts)} convert and were verified: {', '.join(converts)}")
    for outcome, said in _SAID.items():
        if names := by_outcome.get(outcome):
            lines += ["", f"{len(names)} {said}:"]
            lines += [f"  {name}: {found['families'][name]['reason']}" for name in names]
    return "\n".join(lines)
