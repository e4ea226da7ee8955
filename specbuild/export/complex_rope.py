"""Rotary embeddings that a model computes with complex numbers (DeepSeek V2, Llama 4), with real ones.

ONNX has no complex numbers. The angles' cosines and sines are passed on instead, and the rotation is ONNX's operator.
Both swaps are proved on random inputs against the model's own code.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.onnx.ops import rotary_embedding

from specbuild.export.swaps import Swap

NAMES = ["xq", "xk", "freqs_cis"]


def rotate(heads_at: int, xq: Tensor, xk: Tensor, freqs_cis: Tensor) -> tuple[Tensor, ...]:
    """RotaryEmbedding-23 on interleaved pairs, in float32.

    xq, xk [B, H, S, D] for ``heads_at`` 1, [B, S, H, D] for 2; freqs_cis float32 [B, S, D/2, 2], as from ``angles``.
    """
    cos, sin = freqs_cis[..., 0], freqs_cis[..., 1]

    def rotated(x: Tensor) -> Tensor:
        heads_first = x.float() if heads_at == 1 else x.float().transpose(1, 2)
        turned: Tensor = rotary_embedding(heads_first, cos, sin, interleaved=True)
        return (turned if heads_at == 1 else turned.transpose(1, 2)).type_as(x)

    return rotated(xq), rotated(xk)


def angles(self: Any, x: Tensor, position_ids: Tensor) -> Tensor:
    """Cosines and sines of position_ids [B, S]: float32 [B, S, D/2, 2]."""
    turns: Tensor = position_ids[..., None].float() * self.inv_freq.float()
    return torch.stack([torch.cos(turns), torch.sin(turns)], dim=-1) * float(self.attention_scaling)


def complex_rope_swaps(model: nn.Module, files: Sequence[Any]) -> list[Swap]:
    """What stands in the classes of ``model`` and in its modelling ``files`` during the export."""
    name = "apply_rotary_emb"
    classes = {type(part): part for part in model.modules() if type(part).__name__.endswith("RotaryEmbedding")}
    swaps: list[Swap] = [(kind, "forward", angles) for kind, sample in classes.items() if _same_angles(sample)]
    if swaps:
        for file in files:
            original = getattr(file, name, None)
            if original is not None and list(inspect.signature(original).parameters)[:3] == NAMES:
                swaps += [(file, name, partial(rotate, at)) for at in (1, 2) if _same_rotation(original, at)]
    return swaps


def _same_angles(sample: Any) -> bool:
    positions = torch.tensor([[0, 1, 2], [5, 6, 90]])
    try:
        freqs = sample(torch.zeros(2, 3, 1), positions)
        return freqs.is_complex() and torch.allclose(
            torch.view_as_real(freqs), angles(sample, freqs, positions), atol=1e-5
        )
    except (TypeError, RuntimeError, AttributeError):
        return False


def _same_rotation(original: Callable[..., Any], heads_at: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    xq, xk = (torch.randn(2, heads, 3, 8, generator=generator) for heads in (4, 2))
    turns = torch.randn(2, 3, 4, generator=generator)
    if heads_at == 2:
        xq, xk = xq.transpose(1, 2), xk.transpose(1, 2)
    freqs = torch.stack([torch.cos(turns), torch.sin(turns)], dim=-1)
    try:
        expected = original(xq, xk, torch.view_as_complex(freqs))
    except RuntimeError:  # Heads stand elsewhere.
        return False
    return all(
        a.shape == b.shape and torch.allclose(a, b, atol=1e-5)
        for a, b in zip(expected, rotate(heads_at, xq, xk, freqs), strict=True)
    )
