"""What Medusa heads compute: every head drafts one token, from the same state of the target (arXiv 2401.10774).

A feature is the target's last state behind its final norm. From h, the feature of position p, head i draws::

    x = h;  x = x + silu(linear_j(x)) for each of its residual blocks j
    logits = linear(x), for the token at position p + 2 + i

The target itself knows the token at p + 1. So before a round p is the position in front of the last committed token,
and all of a round's draft tokens come from one pass.
"""

from __future__ import annotations

from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.onnx.ops import symbolic
from typing_extensions import override

from specbuild.export.attention import gather_features, scatter
from specbuild.export.exporter import export_module
from specbuild.head_formats.medusa import MedusaHead
from specbuild.heads.module import Contract, GraphModule, load_parameters, require_vocab
from specrun.engine_dir.cache_tensors import CacheTensor


class ResBlock(nn.Module):
    """x + silu(linear(x))"""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    @override
    def forward(self, x: Tensor) -> Tensor:
        """[.., H] -> [.., H]"""
        return x + functional.silu(self.linear(x))


class Medusa(GraphModule, nn.ModuleList):
    """All heads; parameters are named as in the files."""

    def __init__(self, head: MedusaHead, dtype: torch.dtype, vocab_size: int) -> None:
        """vocab_size: the target's. Raises CheckpointError and UnsupportedModelError, see ``load_parameters``."""
        require_vocab(head, vocab_size)
        width = head.hidden_size
        with torch.device("meta"):
            super().__init__(
                nn.Sequential(
                    *(ResBlock(width) for _ in range(head.num_layers)), nn.Linear(width, vocab_size, bias=False)
                )
                for _ in range(head.num_heads)
            )
        self.head, self.dtype, self.vocab_size = head, dtype, vocab_size
        self.weights = load_parameters(self, head, dtype)
        self.eval()

    @property
    @override
    def caches(self) -> list[CacheTensor]:
        """It keeps nothing of texts."""
        return []

    @property
    @override
    def described(self) -> dict[str, Any]:
        return {"vocab_size": self.vocab_size, "parallel_drafts": len(self)}

    @override
    def export(self) -> ir.Model:
        shapes = [CacheTensor(heads=1, head_dim=self.head.hidden_size)]
        return export_module(Contract(self), shapes, True, self.dtype, f"{self.head.directory}: the heads")

    @override
    def run_pass(
        self, input_ids: Tensor, write_indices: Tensor, logits_indices: Tensor, past: list[Tensor]
    ) -> tuple[Tensor, ...]:
        (features,), (batch, wanted) = past, logits_indices.shape
        position = (write_indices + logits_indices[:, 0] - 1).clamp(min=0)
        # Tokens mean nothing here, and none is negative. But TensorRT drops an input whose values are not used.
        position = torch.where(input_ids[:, 0] < 0, 0, position)
        states = gather_features(features, position[:, None].expand(-1, wanted))
        logits = [head(_slot(states, number)).float() for number, head in enumerate(self)]
        shape = (batch, wanted, self.vocab_size)
        drafted = symbolic("Concat", tuple(logits), {"axis": 1}, dtype=torch.float32, shape=shape, version=13)
        return drafted, scatter(features, states[:, :1][:, None], position)


def _slot(states: Tensor, number: int) -> Tensor:
    """One of ``states`` [B, K, H], or none where there are no more: a head whose logits are not used costs nothing."""
    bounds = tuple(torch.tensor([value]) for value in (number, number + 1, 1))
    shape = (states.shape[0], 1, states.shape[2])
    return symbolic("Slice", (states, *bounds), dtype=states.dtype, shape=shape, version=13)
