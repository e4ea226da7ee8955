"""EAGLE-3 in plain torch, from the tensors, one text at a time and from its beginning for every token."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from tests.helpers.families import VOCAB
from tests.helpers.heads.made import Dialect, Tensors


def fused(dialect: Dialect, tensors: Tensors, states: Sequence[torch.Tensor]) -> torch.Tensor:
    """states: [.., S, H] that go into each layer of the target, then what comes out of the last -> [.., S, W]"""
    if "eagle1" in dialect.flags:
        return states[-1]
    chosen = [states[layer] for layer in dialect.reads]
    if "fc_norm" in dialect.flags:
        chosen = [rms(state, tensors[f"fc_norm.{i}.weight"]) for i, state in enumerate(chosen)]
    both = torch.cat(chosen, dim=-1)
    if "norm_before_fc" in dialect.flags:
        both = rms(both, tensors["input_norm.weight"])
    return both @ tensors["fc.weight"].T


def chain(
    dialect: Dialect, tensors: Tensors, embedding: torch.Tensor, features: torch.Tensor, tokens: list[int], length: int
) -> torch.Tensor:
    """Logits [1 + drafts, V] behind the first ``length`` tokens and behind each draft, the others of ``tokens``.

    features: the target's, of the tokens before the last of the text.
    """
    known = features[: length - 1]
    found = []
    for end in range(length, len(tokens) + 1):
        # x_1 stands beside the feature of x_0, and so on.
        y = layers(dialect, tensors, embedding[torch.tensor(tokens[1:end])], known)
        normed = y[-1] if "eagle1" in dialect.flags else rms(y[-1], tensors["norm.weight"])
        own = torch.full((VOCAB,), float("-inf"))
        ids = torch.arange(len(tensors["lm_head.weight"])) + tensors.get("d2t", torch.tensor(0))
        own[ids] = tensors["lm_head.weight"] @ normed
        found.append(own)
        known = torch.cat([known, (normed if "norm_output" in dialect.flags else y[-1])[None]])
    return torch.stack(found)


def layers(dialect: Dialect, tensors: Tensors, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    """y [.., S, width] of embedded tokens beside the features of the positions before them."""
    first = "layers.0."
    if "eagle1" in dialect.flags:
        y = torch.cat([embedded, hidden], dim=-1) @ tensors["fc.weight"].T + tensors["fc.bias"]
        y = y + _attention(dialect, tensors, first, y)
        return y + mlp(tensors, first, y)
    normed = rms(hidden, tensors[f"{first}hidden_norm.weight"])
    both = torch.cat([rms(embedded, tensors[f"{first}input_layernorm.weight"]), normed], dim=-1)
    y = normed if "norm_before_residual" in dialect.flags else hidden
    y = y + _attention(dialect, tensors, first, both)
    y = y + mlp(tensors, first, y)
    for number in range(1, dialect.num_layers):
        layer = f"layers.{number}."
        y = y + _attention(dialect, tensors, layer, rms(y, tensors[f"{layer}input_layernorm.weight"]))
        y = y + mlp(tensors, layer, y)
    return y


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-5) * weight


def mlp(tensors: Tensors, layer: str, y: torch.Tensor) -> torch.Tensor:
    x = rms(y, tensors[f"{layer}post_attention_layernorm.weight"])
    gate, up, down = (tensors[f"{layer}mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
    return (functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def _attention(dialect: Dialect, tensors: Tensors, layer: str, x: torch.Tensor) -> torch.Tensor:
    count, size = x.shape[-2], dialect.head_dim
    q, k, v = ((x @ tensors[f"{layer}self_attn.{part}_proj.weight"].T).unflatten(-1, (-1, size)) for part in "qkv")
    if "qk_norm" in dialect.flags:
        q, k = (rms(part, tensors[f"{layer}self_attn.{name}_norm.weight"]) for part, name in ((q, "q"), (k, "k")))
    angles = torch.arange(count)[:, None] * dialect.theta ** (-torch.arange(0, size, 2) / size)
    q, k = turned(q, angles), turned(k, angles)
    k, v = (part.repeat_interleave(q.shape[-2] // part.shape[-2], dim=-2) for part in (k, v))
    scores = torch.einsum("...qhd,...khd->...hqk", q, k) * size**-0.5
    scores = scores.masked_fill(torch.ones(count, count, dtype=torch.bool).triu(1), float("-inf"))
    mixed = torch.einsum("...hqk,...khd->...qhd", scores.softmax(-1), v)
    return mixed.flatten(-2) @ tensors[f"{layer}self_attn.o_proj.weight"].T


def turned(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    one, other = x.chunk(2, dim=-1)
    cos, sin = angles.cos()[..., None, :], angles.sin()[..., None, :]
    return torch.cat([one * cos - other * sin, other * cos + one * sin], dim=-1)
