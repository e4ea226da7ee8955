"""Whether passes of every shape give a row the same bits: what ``specbuild engine`` found.

Kernels may choose how they add up by a pass's shape. Where they do not, a model writes the same text whatever drafts,
batches, chunks of prompts or reused prefixes its passes meet.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import override


class BitExact(BaseModel):
    """What a probe of the built engine found, on one processor."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    shapes_agree: bool
    """Whether passes of every shape that was tried gave a row the same bits."""
    near_tie: float = Field(ge=0, allow_inf_nan=False)
    """The largest difference that shapes, or the last bits of keys and values, made to a logit, as a share of the
    row's largest."""
    processor: str
    """The processor and the runtime that this holds for."""

    @override
    def __str__(self) -> str:
        return "exact to the bit" if self.shapes_agree else "exact up to near-ties: bits depend on a pass's shape"
