"""What a model keeps of each row of a batch: keys and values by position, and the states of recurrent layers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from specrun.engine_dir.contract import state_name

PACKED_BLOCK = 32
"""Numbers of a packed head that share a scale."""
MOST_PACKED = 1024
"""The widest head that is packed."""
LEAST_REPLAYS = 16
"""The fewest tokens that recurrent layers can read again, whatever the engine's ``max_draft_len``.

More are a multiple of it, so that rows of kept tokens begin where TensorRT takes them.
"""


class CacheTensor(BaseModel):
    """One cache tensor of one layer, [B, heads, S_max, head_dim]."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    heads: int = Field(ge=1, le=1 << 16)
    head_dim: int = Field(ge=1, le=1 << 16)
    """Elements of a head: of a packed one, bytes."""
    in_float32: bool = False
    """Whether these are float32 whatever the other tensors' are: features beside packed keys and values."""

    def elements(self, nbytes: int) -> int:
        """How many elements of ``nbytes`` each a position takes."""
        return self.heads * self.head_dim * (4 // nbytes if self.in_float32 else 1)

    def packed(self, bits: int) -> CacheTensor:
        """The tensor in uint8: float16, or codes of ``bits`` and bfloat16 scales for 32 each.

        See cpu_operators/packed_heads.h.
        """
        return CacheTensor(heads=self.heads, head_dim=self.head_dim * bits // 8 + scale_bytes(self.head_dim, bits))


def can_be_packed(caches: Sequence[CacheTensor]) -> bool:
    """Whether all heads of [key_0, value_0, key_1, ..] have widths that can be packed."""
    pairs = zip(caches[::2], caches[1::2], strict=True)
    return bool(caches) and all(is_packable(key.head_dim, value.head_dim) for key, value in pairs)


def is_packable(width: int, value_width: int) -> bool:
    """Whether heads of so many numbers can be packed."""
    return width == value_width and width % PACKED_BLOCK == 0 and 0 < width <= MOST_PACKED


def key_bits(value_bits: int) -> int:
    """Bits of keys beside values of so many."""
    return max(8, value_bits)


def packed_form(value_bits: int) -> str:
    """What people are told of packed keys and values."""
    return "float16" if value_bits == 16 else f"8 and {value_bits} bits"


def packed_caches(caches: Sequence[CacheTensor], value_bits: int) -> list[CacheTensor]:
    """[key_0, value_0, key_1, ..] packed."""
    return [cache.packed(value_bits if number % 2 else key_bits(value_bits)) for number, cache in enumerate(caches)]


def scale_bytes(head_dim: int, bits: int) -> int:
    """Bytes of a packed head's scales, which stand behind its codes; float16 has none. head_dim: numbers."""
    return 0 if bits == 16 else 2 * (head_dim // PACKED_BLOCK)


class StateTensor(BaseModel):
    """One tensor that a recurrent layer keeps, float32; see ``contract``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    layer: int = Field(ge=0, le=1 << 16)
    """Number of the layer among the model's layers."""
    part: str = Field(pattern=r"^(state|inputs|convolution\.[0-9])$")
    shape: list[int] = Field(min_length=1, max_length=4)
    """Shape of one row, without the axis of tokens."""
    history: int | None = Field(default=None, ge=0, le=1 << 10)
    """Number of tokens on the first axis before those that may be read again; None if there is no axis of tokens."""

    def row_shape(self, replays: int) -> tuple[int, ...]:
        """The shape of a row where ``replays`` tokens can be read again."""
        return tuple(self.shape) if self.history is None else (self.history + replays, *self.shape)

    @property
    def past_name(self) -> str:
        """The name of the input."""
        return state_name("past", self.layer, self.part)

    @property
    def present_name(self) -> str:
        """The name of the output."""
        return state_name("present", self.layer, self.part)


def state_bytes(states: Sequence[StateTensor], rows: int, replays: int = LEAST_REPLAYS) -> int:
    """Bytes of what recurrent layers keep of ``rows`` rows, of which they can read ``replays`` tokens again."""
    return 4 * rows * sum(math.prod(state.row_shape(replays)) for state in states)
