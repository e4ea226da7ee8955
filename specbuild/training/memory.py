"""Memory of the backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch.utils.checkpoint import checkpoint

Result = TypeVar("Result")

KEPT = 1 << 26
"""Elements: larger results of a function are computed again in the backward pass, and not kept till then."""


def sparing(elements: int, function: Callable[..., Result], *inputs: torch.Tensor) -> Result:
    """What ``function`` makes of ``inputs``. elements: of the largest tensor on the way, which is not kept if large."""
    if elements <= KEPT or not torch.is_grad_enabled():
        return function(*inputs)
    result: Result = checkpoint(function, *inputs, use_reentrant=False)
    return result
