"""Which passes of an engine give a row the same bits, whatever else they hold: what ``specbuild engine`` found.

Kernels choose how they add up by a pass's shape. Passes of one class of shapes add up alike; so a model that is never
run outside its class writes the same text, whatever drafts, batches, chunks of prompts or reused prefixes it meets.
"""

from __future__ import annotations

import math
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

RowMultiple = Literal[1, 2, 4, 8, 16]


class ShapeClass(BaseModel):
    """Shapes of passes whose bits agree; what is smaller is padded. By default: all shapes."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    query_len: int = Field(default=1, ge=1, le=64)
    """Fewest tokens of a row."""
    num_logits: int = Field(default=1, ge=1, le=64)
    """Fewest logits of a row."""
    row_multiple: RowMultiple = 1
    """The tokens of all rows together are a multiple of this, and the logits as well: kernels take so many at a time.

    It divides the positions of every cache, so a padded row is never longer than its cache.
    """

    def pad_query_len(self, batch: int, query_len: int) -> int:
        """The tokens of a row, at least ``query_len``, that a pass of ``batch`` rows needs to be in the class."""
        return self._padded(batch, max(query_len, self.query_len))

    def pad_num_logits(self, batch: int, num_logits: int) -> int:
        """The same of a row's logits."""
        return self._padded(batch, max(num_logits, self.num_logits))

    def _padded(self, batch: int, size: int) -> int:
        step = self.row_multiple // math.gcd(self.row_multiple, batch)
        return -(-size // step) * step

    @property
    def pads(self) -> bool:
        """Whether there are shapes outside."""
        return self != ANY_SHAPE

    def __str__(self) -> str:
        if not self.pads:
            return "passes of every shape"
        sizes = {"tokens": self.query_len, "logits": self.num_logits}
        least = " and ".join(f"{size} or more {name} a row" for name, size in sizes.items() if size > 1)
        multiple = f"multiples of {self.row_multiple} tokens and logits over all rows" if self.row_multiple > 1 else ""
        return "passes of " + ", in ".join(part for part in (least, multiple) if part)


ANY_SHAPE = ShapeClass()


class BitExact(BaseModel):
    """What a probe of the built engine found, on one processor."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    shapes: ShapeClass | None
    """None: no class was found."""
    cost: float = Field(ge=0, allow_inf_nan=False)
    """How much longer a one-token round takes when it is padded into the class, as a share of its time."""
    near_tie: float = Field(ge=0, allow_inf_nan=False)
    """The largest difference that shapes made to a logit when none was padded, as a share of the row's largest."""
    processor: str
    """The processor and the runtime that this holds for."""

    def __str__(self) -> str:
        if self.shapes is None:
            return "exact up to near-ties: no two shapes of a pass give a row the same bits"
        cost = f", {self.cost:.0%} slower; --no_bit_exact of specrun does without" if self.shapes.pads else ""
        return f"exact to the bit: {self.shapes}{cost}"
