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
    "place_drafts": 1,
    "move_drafts": 1,
    "commit_records": 1,
    "copy_blocks": 256,
    "swap_rows": 256,
    "swap": 256,
}
"""Threads per block."""

TEAMS = frozenset({"adjust", "draw_draft", "judge_target", "accept", "log_probabilities"})
"""Kernels in which the blocks of the grid's third dimension work on one row, or one position of a row, together."""

MEETING_BYTES = 176
"""Of device memory that a team needs, zeros at first: ``Meeting`` in ``round.cu``."""
_MOST_BLOCKS = 32
_LOGITS_OF_A_THREAD = 4
_BYTES_OF_A_BLOCK = 1 << 14

MAX_VOCAB = 1 << 19
"""Largest vocabulary: the kernels add up this many weights of at most 1 in 64-bit fixed point."""


def team_blocks(teams: int, vocab: int, multiprocessors: int) -> int:
    """How many blocks each of ``teams`` teams has: all of them run at the same time, a block on a multiprocessor."""
    useful = -(-vocab // (max(THREADS.values()) * _LOGITS_OF_A_THREAD))
    return max(1, min(multiprocessors // teams, useful, _MOST_BLOCKS))


def memory_blocks(size: int) -> int:
    """How many blocks move ``size`` bytes."""
    return max(1, -(-size // _BYTES_OF_A_BLOCK))


def source() -> str:
    """The text of ``round.cu``."""
    return (resources.files(__package__) / "round.cu").read_text(encoding="utf-8")


def compile_kernels(arch: str, text: str, form: str = "cubin") -> Any:
    """Compile kernels for a GPU architecture such as ``sm_90`` with NVRTC, which needs no GPU: a cuda.core ObjectCode.

    form: ``cubin`` is machine code; ``ptx`` is had for an architecture such as ``compute_90``. Multiplications and
    additions are not fused, so that rounding is the host's.
    """
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(arch=arch, std="c++17", fma=False)
    return Program(text, "c++", options).compile(form)
