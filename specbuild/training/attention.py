"""Attention of a head that is trained on chains of drafts (EAGLE-3's training-time test), for all origins at once.

At step k the query of origin i stands behind k drafts of its own. It sees the keys that step 0 made of the target's
features, up to its own origin, and the keys of its own drafts: those of origin i at steps 1 to k.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from specbuild.training.memory import sparing

NAME = "specbuild_chains"


class ChainKeys:
    """Keys and values of each layer and step, where transformers' layers expect a cache."""

    def __init__(self) -> None:
        self._steps: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> Any:
        """Add those of a step, [B, H_kv, n, D]; all steps so far, [B, H_kv, steps, n, D], of the first n origins."""
        steps = self._steps.setdefault(layer, [])
        steps.append((key, value))
        count = key.shape[-2]
        return tuple(torch.stack([step[part][..., :count, :] for step in steps], dim=2) for part in range(2))


def attend(
    _module: nn.Module, query: Tensor, key: Tensor, value: Tensor, _mask: None, **options: Any
) -> tuple[Tensor, None]:
    """query [B, H, n, D], key and value [B, H_kv, steps, n, D] -> [B, n, H, D]; see above."""
    elements = query.shape[0] * query.shape[1] * query.shape[2] ** 2
    return sparing(elements, _weigh, query * options["scaling"], key, value).transpose(1, 2), None


def _weigh(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    batch, heads, count, size = query.shape
    groups = query.reshape(batch, key.shape[1], -1, count, size)
    first = torch.einsum("bhgqd,bhkd->bhgqk", groups, key[:, :, 0])
    future = torch.ones(count, count, dtype=torch.bool, device=query.device).triu(1)
    later = torch.einsum("bhgqd,bhsqd->bhgqs", groups, key[:, :, 1:])
    scores = torch.cat([first.masked_fill(future, float("-inf")), later], dim=-1)
    weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
    output = torch.einsum("bhgqk,bhkd->bhgqd", weights[..., :count], value[:, :, 0])
    output = output + torch.einsum("bhgqs,bhsqd->bhgqd", weights[..., count:], value[:, :, 1:])
    return output.reshape(batch, heads, count, size)


AttentionInterface.register(NAME, attend)
