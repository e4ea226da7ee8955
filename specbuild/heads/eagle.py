"""What EAGLE heads compute: at position p they read the token x_p and h, the feature of position p - 1."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from specbuild.heads.module import HeadModule


class Eagle1(HeadModule):
    """EAGLE-1, and EAGLE-2, which differs in how it drafts only.

    A feature is the target's last state behind its final norm. At position p the head reads the token x_p and h, the
    feature of position p - 1 (arXiv 2401.15077; SafeAILab's code)::

        y = layers(fc([E[x_p], h])), whose first layer has no norm in front of attention
        logits = the target's lm_head(y), for the token at position p + 1

    Its own feature of position p is y.
    """

    @override
    def add_parts(self, first: Any, make_norm: Callable[[], nn.Module]) -> None:
        width = self.head.hidden_size
        self.fc = nn.Linear(2 * width, width, bias="fc.bias" in self.head.tensors)
        self.norm = nn.Identity()
        first.input_layernorm = nn.Identity()

    @override
    def run_first(self, layer: Any, embedded: Tensor, hidden: Tensor, how: Mapping[str, Any]) -> Tensor:
        y: Tensor = layer(self.fc(torch.cat([embedded, hidden], dim=-1)), **how)
        return y


class Eagle3(HeadModule):
    """EAGLE-3.

    At position p it reads the token x_p and h, the feature of position p - 1 (arXiv 2503.01840; SpecForge's code)::

        r = hidden_norm(h) if norm_before_residual else h
        y = r + attention([input_layernorm(E[x_p]), hidden_norm(h)])
        y = y + mlp(post_attention_layernorm(y)), then further layers as in any model
        logits = lm_head(norm(y)), for the token at position p + 1

    Its own feature of position p is y, or norm(y) with ``norm_output``. Positions are those of the tokens: a constant
    shift changes nothing under rotary embeddings.
    """

    @override
    def add_parts(self, first: Any, make_norm: Callable[[], nn.Module]) -> None:
        """Attention of the first layer takes two vectors side by side."""
        self.norm, first.hidden_norm = make_norm(), make_norm()
        for name in ("q_proj", "k_proj", "v_proj"):
            plain = getattr(first.self_attn, name)
            wide = nn.Linear(2 * self.head.hidden_size, plain.out_features, bias=plain.bias is not None)
            setattr(first.self_attn, name, wide)

    @override
    def run_first(self, layer: Any, embedded: Tensor, hidden: Tensor, how: Mapping[str, Any]) -> Tensor:
        normed = layer.hidden_norm(hidden)
        both = torch.cat([layer.input_layernorm(embedded), normed], dim=-1)
        attended, _ = layer.self_attn(hidden_states=both, **how)
        middle = (normed if self.head.norm_before_residual else hidden) + attended
        y: Tensor = middle + layer.mlp(layer.post_attention_layernorm(middle))
        return y
