"""Families that have no tests of their own convert, as ``specbuild families`` says.

With tests/helpers/families.py, and what the tests of experts convert, these are more than 35 families.
"""

from __future__ import annotations

import pytest
from torch.export import ExportedProgram

from scripts import make_families

FAMILIES = [
    "apertus",
    "arcee",
    "cohere",
    "cohere2",
    "ernie4_5",
    "exaone4",
    "gemma4_text",
    "glm",
    "glm4",
    "gpt_bigcode",
    "granite",
    "helium",
    "internlm3",
    "nemotron",
    "olmo",
    "olmo3",
    "seed_oss",
    "smollm3",
]

TRACED_ANEW = ["apertus", "gemma4_text"]
"""Those with operators that only torch takes apart."""


@pytest.mark.parametrize("family", FAMILIES)
def test_a_small_model_converts(
    family: str, monkeypatch: pytest.MonkeyPatch, decomposed: list[ExportedProgram]
) -> None:
    monkeypatch.setattr(make_families, "LAYERS", 2)
    monkeypatch.setitem(make_families.SIZES, "layers", 2)
    found = make_families.try_family(family)
    assert found["outcome"] == "converts", found
    assert bool(decomposed) == (family in TRACED_ANEW)
    assert found["largest_logit_difference"] < 1e-4
