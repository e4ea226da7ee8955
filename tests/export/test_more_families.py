"""Families that have no tests of their own convert.

With tests/helpers/families.py, and what the tests of experts convert, these are more than 35 families.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.export import ExportedProgram

from specbuild.artifacts.onnx_checkpoint import open_checkpoint
from specbuild.hf.tested_families import TESTED
from tests.helpers.engines import make_onnx
from tests.helpers.families import FAMILIES as CONFIGURED
from tests.helpers.families import OTHERS, RECURRENT
from tests.helpers.small_families import save_small

pytestmark = pytest.mark.slow("families convert: export/test_families.py")

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
def test_a_small_model_converts(family: str, tmp_path: Path, decomposed: list[ExportedProgram]) -> None:
    onnx = make_onnx(save_small(family, tmp_path / "hf"), tmp_path / "onnx")
    difference = open_checkpoint(onnx).max_logit_difference
    assert difference is not None and difference < 1e-4
    assert bool(decomposed) == (family in TRACED_ANEW)


def test_specbuild_families_lists_those_of_the_tests() -> None:
    configured = {config().model_type for config in (CONFIGURED | OTHERS | RECURRENT).values()}
    assert set(TESTED) == {*FAMILIES, *configured}
    assert sorted(TESTED) == list(TESTED)
