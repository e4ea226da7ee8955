"""How the input of a linear layer is rounded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Activation:
    """How the input of a linear layer is rounded before it is multiplied."""

    form: Literal["int8", "float8", "float4"]
    scale: float | None = None
    """The value of one step, fixed by calibration. None: every token's own, from its largest value.

    float4: what the float8 scale of every 16 values is multiplied by; these scales are found from the values.
    """
