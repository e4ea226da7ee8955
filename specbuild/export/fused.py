"""Swap hand-written RoPE and RMSNorm for the ONNX operators that compilers recognize.

Each swap is proved on random inputs against the model's own code first; where the two differ, the model's code
stays and the operator is simply not used.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.onnx.ops import rotary_embedding, symbolic

from specbuild.export.attention import gather_logits_positions
from specbuild.export.complex_rope import complex_rope_swaps
from specbuild.export.experts import expert_swaps
from specbuild.export.recurrent import recurrent_functions
from specbuild.export.swaps import Swap, swapped


@contextmanager
def fused_operators(model: nn.Module) -> Iterator[list[str]]:
    """While active, ``model`` computes RoPE and RMSNorm through ONNX operators. Yields what was replaced."""
    files = modeling_files(model)
    rope = [*_rope_swaps(files), *complex_rope_swaps(model, files)]
    keep = "slice_logits_to_keep"
    logits: list[Swap] = [(file, keep, gather_logits_positions) for file in files if hasattr(file, keep)]
    swaps = [*rope, *_norm_swaps(model), *expert_swaps(model), *logits]
    with recurrent_functions(files), swapped(*swaps):
        yield [f"{owner.__name__}.{name}" for owner, name, _ in swaps]


def modeling_files(model: nn.Module) -> list[Any]:
    """The Python modules that the parts of ``model`` come from."""
    names = {type(part).__module__ for part in model.modules()}
    return [sys.modules[name] for name in sorted(names) if not name.startswith("torch.")]


# RoPE

QK = ["q", "k", "cos", "sin"]


def _rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """RotaryEmbedding-23 on q, k [B, H, S, D] with cos, sin [B, S, R] whose two halves are the same, R <= D."""
    half = cos.shape[-1] // 2
    return _rope_of_halves(q, k, cos[..., :half], sin[..., :half])


def _rope_of_halves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """The same with cos, sin [B, S, R / 2] (gpt-oss)."""
    width = 2 * cos.shape[-1]
    partial = width if width < q.shape[-1] else 0
    return tuple(rotary_embedding(x.to(cos.dtype), cos, sin, rotary_embedding_dim=partial) for x in (q, k))


def _rope_in_dtype_of_q(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
    """The same, cast back: for models whose cos and sin are float32 whatever the model's dtype (OLMo 2)."""
    return tuple(rotated.to(x.dtype) for x, rotated in zip((q, k), _rope(q, k, cos, sin), strict=True))


def _rope_swaps(files: list[Any]) -> list[Swap]:
    name = "apply_rotary_pos_emb"
    swaps: list[Swap] = []
    for file in files:
        original: Any = getattr(file, name, None)
        if original is not None and list(inspect.signature(original).parameters)[:4] == QK:
            candidates = ((_rope, 2), (_rope_in_dtype_of_q, 2), (_rope_of_halves, 1))
            fits = [rope for rope, halves in candidates if _same_rope(original, rope, halves)]
            swaps += [(file, name, _where_heads_come_first(original, rope)) for rope in fits[:1]]
    return swaps


def _where_heads_come_first(original: Callable[..., Any], rope: Callable[..., Any]) -> Callable[..., Any]:
    """``rope`` for q, k [B, H, S, D]; calls that say that heads stand elsewhere are the model's own."""
    signature = inspect.signature(original)

    def chosen(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        if given.get("unsqueeze_dim", 1) != 1:
            return original(*args, **kwargs)
        return rope(*(given[name] for name in QK))

    return chosen


def _same_rope(original: Callable[..., Any], rope: Callable[..., Any], halves: int) -> bool:
    """Equal in float32, and of the same dtype where q and k are 16 bits wide and cos and sin are not.

    halves: how often each angle stands in cos and sin.
    """
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(2, heads, 3, 8, generator=generator) for heads in (4, 2))
    angles = torch.randn(2, 3, 4, generator=generator)
    cos, sin = (torch.cat([f(angles)] * halves, dim=-1) for f in (torch.cos, torch.sin))
    try:
        half = [[x.dtype for x in f(q.half(), k.half(), cos, sin)] for f in (original, rope)]
        return half[0] == half[1] and _close(original(q, k, cos, sin), rope(q, k, cos, sin))
    except (TypeError, RuntimeError, ValueError, IndexError):
        return False  # Another convention (interleaved, 2-D positions): keep the model's own.


# RMSNorm


def _norm_swaps(model: nn.Module) -> list[Swap]:
    dtype = next(model.parameters()).dtype
    samples: dict[type[nn.Module], nn.Module] = {}
    for part in model.modules():
        if type(part).__name__.endswith("RMSNorm") and getattr(part, "weight", None) is not None:
            samples.setdefault(type(part), part)
    swaps: list[Swap] = []
    for cls, sample in samples.items():
        for forward in (_plain_norm, _wide_norm, _one_plus_norm):
            if _same_norm(sample, forward, dtype):
                swaps.append((cls, "forward", _where_weighted(cls.forward, forward)))
                break
    return swaps


def _where_weighted(original: Callable[..., Any], forward: Callable[..., Tensor]) -> Callable[..., Any]:
    """``forward`` for norms that have a weight; others of the class (Gemma 4's of values) are the model's own."""

    def chosen(self: Any, hidden_states: Tensor) -> Any:
        return original(self, hidden_states) if getattr(self, "weight", None) is None else forward(self, hidden_states)

    return chosen


def _epsilon(norm: Any) -> float:
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)


def _plain_norm(self: Any, hidden_states: Tensor) -> Tensor:
    """RMSNormalization-23: fp32 inside, scaled by the weight in the model's dtype (Llama and its kin)."""
    return rms_norm(hidden_states, self.weight, _epsilon(self))


def _wide_norm(self: Any, hidden_states: Tensor) -> Tensor:
    """The same, scaled in fp32 too (gpt-oss, whose weights may stay in float32 whatever the model's dtype)."""
    return rms_norm(hidden_states.float(), self.weight.float(), _epsilon(self)).to(hidden_states.dtype)


def _one_plus_norm(self: Any, hidden_states: Tensor) -> Tensor:
    """The same with a weight of (1 + w) and fp32 throughout (Gemma)."""
    return rms_norm(hidden_states.float(), 1.0 + self.weight.float(), _epsilon(self)).to(hidden_states.dtype)


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMS norm of the last axis, as one ONNX operator where it is exported."""
    if torch.compiler.is_exporting():
        attributes: dict[str, Any] = {"axis": -1, "epsilon": epsilon, "stash_type": 1}
        return symbolic("RMSNormalization", (x, weight), attributes, dtype=x.dtype, shape=x.shape, version=23)
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    return normed.to(x.dtype) * weight


def _same_norm(sample: Any, forward: Callable[..., Tensor], dtype: torch.dtype) -> bool:
    """Whether ``forward`` is the norm of states of ``dtype``."""
    x = torch.randn(2, 3, sample.weight.shape[-1], generator=torch.Generator().manual_seed(0)).to(dtype)
    try:
        with torch.no_grad():
            return _close([sample(x)], [forward(sample, x)])
    except (TypeError, RuntimeError, AttributeError):
        return False


def _close(expected: Any, actual: Any) -> bool:
    return all(
        a.dtype == b.dtype and a.shape == b.shape and torch.allclose(a.float(), b.float(), rtol=1e-5, atol=1e-5)
        for a, b in zip(expected, actual, strict=True)
    )
