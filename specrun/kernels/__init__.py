"""The kernels of a round: their source, and how they are launched and compiled."""

from __future__ import annotations

from importlib import resources
from typing import Any

THREADS = {
    "feed": 1,
    "adjust": 1024,
    "draw_draft": 1024,
    "judge_target": 1024,
    "accept": 1024,
    "log_probabilities": 1024,
    "copy_blocks": 256,
    "swap": 256,
}
"""Threads per block. A block works on one row, on one position of one row, or on a piece of memory."""

MAX_VOCAB = 1 << 19
"""Largest vocabulary: the kernels add up this many weights of at most 1 in 64-bit fixed point."""


def source() -> str:
    """The text of ``round.cu``."""
    return (resources.files(__package__) / "round.cu").read_text(encoding="utf-8")


def compile_cubin(arch: str, text: str) -> Any:
    """Compile kernels for a GPU architecture such as ``sm_90`` with NVRTC, which needs no GPU: a cuda.core ObjectCode.

    Multiplications and additions are not fused, so that rounding is the host's.
    """
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(arch=arch, std="c++17", fma=False)
    return Program(text, "c++", options).compile("cubin")
