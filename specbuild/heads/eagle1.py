"""What an EAGLE-1 head computes, and EAGLE-2's, which differ in how they draft only.

A feature is the target's last state behind its final norm. At position p the head reads the token x_p and h, the
feature of position p - 1 (arXiv 2401.15077; SafeAILab's code)::

    y = layers(fc([E[x_p], h])), whose first layer has no norm in front of attention
    logits = the target's lm_head(y), for the token at position p + 1

Its own feature of position p is y.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from specbuild.heads.module import HeadModule


class Eagle1(HeadModule):
    """See above."""

    @override
    def add_parts(self, first: Any, make_norm: Callable[[], nn.Module]) -> None:
        width = self.head.hidden_size
        self.fc = nn.Linear(2 * width, width, bias="fc.bias" in self.head.tensors)
        self.norm = nn.Identity()
        first.input_layernorm = nn.Identity()

    @override
    def run_first(
        self, layer: Any, embedded: torch.Tensor, hidden: torch.Tensor, how: Mapping[str, Any]
    ) -> torch.Tensor:
        y: torch.Tensor = layer(self.fc(torch.cat([embedded, hidden], dim=-1)), **how)
        return y
