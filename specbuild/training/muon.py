"""Muon (Keller Jordan et al., 2024): momentum whose every step is orthogonalised, for matrices; AdamW for the rest.

Updates of matrices have the size of AdamW's, so that one learning rate does for both (Moonlight, arXiv 2502.16982).
torch.optim.Muon makes the same steps in bfloat16. On CPUs with instructions for it they take half as long as these in
float32, but twice as long with AVX-512 alone, and twenty times as long with AVX2.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

_MOMENTUM = 0.9
_SIZE = 0.2
"""Root mean square of AdamW's updates, in learning rates."""


class Muon(torch.optim.AdamW):
    """Two groups of parameters: the first, of any shape, are AdamW's; the second, matrices, are Muon's."""

    def __init__(self, others: Iterable[Tensor], matrices: Iterable[Tensor], **options: Any) -> None:
        """options: AdamW's, like ``lr``."""
        super().__init__([{"params": list(others)}], **options)
        self.add_param_group({"params": list(matrices)})

    @torch.no_grad()
    @override
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; those of matrices are used up."""
        _, group = self.param_groups
        for weight in group["params"]:
            if weight.grad is None:
                continue
            state = self.state[weight]
            state.setdefault("step", torch.zeros(()))  # AdamW looks for it when states are loaded.
            mean = state.setdefault("mean", torch.zeros_like(weight))
            mean.lerp_(weight.grad, 1 - _MOMENTUM)
            update = orthogonalised(weight.grad.lerp(mean, _MOMENTUM))
            weight.add_(update, alpha=-_SIZE * group["lr"] * max(weight.shape) ** 0.5)
            weight.grad = None
        super().step()


def orthogonalised(matrix: Tensor) -> Tensor:
    """Roughly U V' of the matrix's singular value decomposition, by Newton-Schulz iteration."""
    tall = matrix.shape[0] > matrix.shape[1]
    x: Tensor = matrix.T if tall else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(4):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.T if tall else x
