"""The structs, numbers and limits that the host and the kernels share. Their C text is made from these.

``header`` is put in front of ``round.cu``. It does not compile where a compiler's sizes or offsets differ from numpy's.
"""

from __future__ import annotations

import enum
from typing import Any

import numpy as np

from specrun.kv_cache import BLOCK
from specrun.sampling.limits import MAX_BIASES, MAX_LOGPROBS, MAX_STOP_IDS
from specrun.sampling.sampler import Purpose

MAX_VOCAB = 1 << 19
"""Largest vocabulary: the kernels add up this many weights of at most 1 in 64-bit fixed point."""
IN_PROMPT = np.uint32(1 << 31)
"""The bit of a token's count which says that the token is in the prompt; the others count it in the output."""
_MAX_SUMS = 7
"""Maximum number of sums in one reduction of the threads of a row."""

SAMPLING = np.dtype(
    [
        ("seed", "<u8"),
        ("top_p", "<f8"),  # 1: off.
        ("temperature", "<f4"),  # 0: greedy.
        ("top_k", "<i4"),  # 0: off.
        ("min_p", "<f4"),  # 0: off.
        ("use_logits", "<i4"),  # 1: modified rejection sampling; 0: drafts are compared with the target's own choice.
        ("draft_len", "<i4"),  # The most draft tokens of a round.
        ("repetition", "<f4"),  # Penalty; 1: off.
        ("presence", "<f4"),  # Penalty; 0: off.
        ("frequency", "<f4"),  # Penalty; 0: off.
        ("biases", "<i4"),  # How many of its row of the bias table count.
        ("stops", "<i4"),  # How many of its row of the stop ids count.
        ("free_length", "<i4"),  # Shorter texts must not end: their stop ids are forbidden.
        ("logprobs", "<i4"),  # Log-probabilities of the token and of so many likeliest ones; -1: of none.
        ("constrained", "<i4"),  # 1: masks say which tokens may follow.
    ],
    align=True,
)
"""Sampling options of a row."""

PROGRESS = np.dtype(
    [
        ("length", "<i4"),  # Committed tokens.
        ("remaining", "<i4"),  # Tokens that may still be committed; 0: the row has ended.
    ]
)
"""Progress of a row: its length, and its tokens that remain."""

TOKEN_VALUE = np.dtype([("id", "<i4"), ("value", "<f4")])
"""A token id with its bias or its log-probability."""

DISTRIBUTION = np.dtype(
    [
        ("peak", "<f4"),  # The largest logit.
        ("best", "<i4"),  # Its id; -1 where the logits are not numbers.
        ("temperature", "<f4"),  # 0: all of the mass is at `best`.
        ("smallest", "<f4"),  # Weights below this threshold are 0.
        ("total", "<f4"),  # The sum of the weights that are left; 1 for rows that compare tokens, which need none.
    ]
)
"""A row of logits as a distribution: all that is needed to turn one logit into its probability."""

CACHE_TENSOR = np.dtype(
    [
        ("rows", "<u8"),  # Address of [rows, heads, length] positions.
        ("pool", "<u8"),  # Address of [blocks, heads, BLOCK] positions, or of a pass's outputs [B, heads, query_len].
        ("heads", "<i4"),
        ("size", "<i4"),  # Bytes of a position: an even number.
    ]
)
"""A tensor of a key-value cache; or of the states of rows, which have one head and one position."""

BARRIER = np.dtype(
    [
        ("arrived", "<u4"),  # Arrivals of blocks since the kernel began.
        ("left", "<u4"),  # Blocks that have ended.
        ("values", "<u8", (3, _MAX_SUMS)),  # Values of a reduction in this phase, in the next and in the one before.
    ]
)
"""The barrier of the blocks that work on one row. All zeros before a kernel and after it."""

STRUCTS = {
    "Sampling": SAMPLING,
    "Progress": PROGRESS,
    "TokenValue": TOKEN_VALUE,
    "Distribution": DISTRIBUTION,
    "CacheTensor": CACHE_TENSOR,
    "Barrier": BARRIER,
}
"""Structs by their names in the kernels."""


class Record(enum.IntEnum):
    """Indices into a row's record of 64-bit integers, the result of a round."""

    DRAFTED = 0  # Number of draft tokens: fewer than planned where the draft failed.
    ACCEPTED = 1  # Number of accepted ones.
    NEXT_TOKEN = 2  # The target's token after them; -1 where its logits were not numbers.
    DRAFTS = 3  # The first of the draft tokens, which are the rest.


def record_len(draft_len: int) -> int:
    """Integers of a row's record in a round of ``draft_len``."""
    return Record.DRAFTS + draft_len


_CONSTANTS = {
    "MAX_VOCAB": MAX_VOCAB,
    "MAX_STOP_IDS": MAX_STOP_IDS,
    "MAX_BIASES": MAX_BIASES,
    "MAX_LOGPROBS": MAX_LOGPROBS,
    "MAX_SUMS": _MAX_SUMS,
    "CACHE_BLOCK": BLOCK,
}
_TYPES = {
    "u8": "unsigned char",
    "u16": "unsigned short",
    "u32": "unsigned int",
    "u64": "unsigned long long",
    "i64": "long long",
}
C_TYPES = {"<i4": "int", "<u4": "u32", "<i8": "i64", "<u8": "u64", "<f4": "float", "<f8": "double"}
"""Names of numpy's types in the kernels."""


def header() -> str:
    """The C text that goes in front of the kernels: types, constants, enums and structs."""
    lines = ["// Made by kernels/layout.py, which explains it."]
    lines += [f"typedef {meaning} {name};" for name, meaning in _TYPES.items()]
    lines.append(f"enum {{ {_values(_CONSTANTS)} }};")
    lines.append(f"const u32 IN_PROMPT = {int(IN_PROMPT)}u;")
    for kind in (Purpose, Record):
        lines.append(f"enum {kind.__name__} {{ {_values({member.name: member.value for member in kind})} }};")
    lines += [struct(name, dtype) for name, dtype in STRUCTS.items()]
    return "\n".join([*lines, ""])


def struct(name: str, dtype: np.dtype[Any]) -> str:
    """A struct in C, and checks that its size and offsets are numpy's."""
    fields, offsets = [], []
    for field, (kind, offset, *_) in (dtype.fields or {}).items():
        element, shape = kind.subdtype or (kind, ())
        fields.append(f"  {C_TYPES[element.str]} {field}{''.join(f'[{size}]' for size in shape)};")
        offsets.append(f'static_assert(__builtin_offsetof({name}, {field}) == {offset}, "where {name}.{field} lies");')
    size = f'static_assert(sizeof({name}) == {dtype.itemsize}, "the size of {name}");'
    # NVRTC has no offsetof; it lays structs out as the host's compiler does.
    return "\n".join([f"struct {name} {{", *fields, "};", size, "#ifndef __CUDACC__", *offsets, "#endif"])


def _values(values: dict[str, int]) -> str:
    return ", ".join(f"{name} = {value}" for name, value in values.items())
