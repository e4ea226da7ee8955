"""What the host and the kernels lay out alike: C compilers and numpy must agree, and say so where they do not."""

from __future__ import annotations

import re
import subprocess
from typing import Any

import numpy as np
import pytest

from specrun.gpu.kernels import layout, source


def compiles(text: str) -> str:
    """What the host's C++ compiler has against ``text``."""
    command = ["c++", "-std=c++20", "-fsyntax-only", "-x", "c++", "-"]
    return subprocess.run(command, input=text, text=True, capture_output=True, check=False).stderr


def test_structs_are_checked_by_the_compiler() -> None:
    assert compiles(layout.header()) == ""


@pytest.mark.parametrize(
    "dtype, complaint",
    [
        ([("a", "<i4"), ("b", "<u8")], "where Wrong.b lies"),
        ([("a", "<u8"), ("b", "<i4")], "the size of Wrong"),
    ],
)
def test_a_struct_that_c_lays_out_otherwise_does_not_compile(dtype: Any, complaint: str) -> None:
    """numpy leaves no gaps where C aligns."""
    text = layout.header() + layout.struct("Wrong", np.dtype(dtype))
    assert complaint in compiles(text)


def test_every_struct_comes_from_here() -> None:
    """What the kernels take by address from the host is a plain number or one of these structs."""
    text = source().partition("#line")[2]
    kernels = re.findall(r"\n(?:ROW_)?KERNEL void \w+\((.*?)\)", text, re.DOTALL)
    assert len(kernels) > 10
    pointed = set(re.findall(r"(\w+)\*", ", ".join(kernels)))
    assert pointed <= {*layout.STRUCTS, *layout.C_TYPES.values(), "void"}
    assert not set(re.findall(r"struct (\w+)", text)) & set(layout.STRUCTS)


def test_errors_are_where_round_cu_says() -> None:
    """The header in front does not move the lines that compilers name."""
    text = source().replace("FUNCTION float infinity()", "FUNCTION float infinity(")
    line = text.partition("#line")[2][: text.partition("#line")[2].index("FUNCTION float infinity(")].count("\n")
    assert f"round.cu:{line}:" in compiles(text)
