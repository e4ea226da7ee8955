"""The kernels of a round: their source, and how they are launched and compiled."""

from __future__ import annotations

from importlib import resources
from typing import Any

THREADS = {
    "feed": 1,
    "draw_draft": 1024,
    "choose_target": 1024,
    "describe_target": 1024,
    "accept_tokens": 1,
    "accept_logits": 1024,
}
"""Threads per block. A block works on one row, or on one position of one row."""

MAX_VOCAB = 1 << 19
"""Largest vocabulary: the kernels add up this many weights of at most 1 in 64-bit fixed point."""


def source() -> str:
    """The text of ``round.cu``."""
    return (resources.files(__package__) / "round.cu").read_text(encoding="utf-8")


def compile_cubin(arch: str) -> Any:
    """Compile for a GPU architecture such as ``sm_90`` with NVRTC, which needs no GPU: a cuda.core ObjectCode.

    Multiplications and additions are not fused, so that rounding is the host's.
    """
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(arch=arch, std="c++17", fma=False)
    return Program(source(), "c++", options).compile("cubin")
