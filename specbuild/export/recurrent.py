"""Recurrent layers while a transformers model is exported: gated delta nets, Mamba 2, short convolutions.

Their modules call a few functions of their file (a causal convolution, a rule that updates the state) around calls of
the ``Cache`` protocol. Those functions are swapped for the two functions of ``graph.recurrent``, by their names and
arguments, whatever the family. What a layer keeps of a row is described in ``specrun/engine_dir/contract.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.onnx.ops import symbolic_multi_out
from transformers.activations import ACT2FN
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionCacheLayerMixin
from typing_extensions import override

from specbuild.export.swaps import swapped
from specbuild.graph.recurrent import CONVOLUTION, DOMAIN, RULES
from specrun.engine_dir.cache_tensors import StateTensor
from specrun.errors import UnsupportedModelError

L2_EPSILON = 1e-6
"""Epsilon of the L2 norm of queries and keys in transformers' delta rules."""


@dataclass(frozen=True)
class Progress:
    """The inputs that say how far each row is, [B] each."""

    write_indices: Tensor
    state_indices: Tensor
    keep_indices: Tensor

    def inputs(self) -> tuple[Tensor, ...]:
        return self.write_indices, self.state_indices, self.keep_indices


@dataclass
class RecurrentStates:
    """What one layer keeps: its tensors as the pass finds them, and as it leaves them."""

    progress: Progress | None
    """Inputs with each row's progress; None in a trial run, which only records the tensors."""
    past: dict[str, Tensor] = field(default_factory=dict)
    """The graph's inputs, by part."""
    present: dict[str, Tensor] = field(default_factory=dict)
    """The graph's outputs, by part."""
    tensors: list[StateTensor] = field(default_factory=list)
    """Tensors that a trial run has recorded."""
    layer: int = 0
    """Number of the layer, for the recorded tensors."""
    convolutions: int = 0
    """Number of convolutions computed so far in this pass."""

    def convolve(self, x: Tensor, weight: Tensor) -> Tensor:
        """The causal convolution of x [B, C, S] with weight [C, K], over what went before too."""
        part = f"convolution.{self.convolutions}"
        self.convolutions += 1
        if self.progress is None:
            history = weight.shape[1] - 1
            self.tensors.append(StateTensor(layer=self.layer, part=part, shape=[x.shape[1]], history=history))
            return torch.zeros_like(x)
        tokens = x.float().transpose(1, 2)
        inputs = (tokens, weight.float()[:, None], self.past[part], *self.progress.inputs())
        y, self.present[part] = symbolic_multi_out(
            f"{DOMAIN}::{CONVOLUTION}",
            inputs,
            {"channels": x.shape[1]},
            dtypes=(torch.float32, torch.float32),
            shapes=(tokens.shape, self.past[part].shape),
            version=1,
        )
        return y.transpose(1, 2).to(x.dtype)

    def attend(
        self, rule: str, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor | None, scale: float
    ) -> Tensor:
        """Linear attention by ``rule``: query and key [B, S, H, K], value [B, S, H, V], decay and beta [B, S, H].

        decay may be [B, S, H, K]. Returns [B, S, H, V], float32.
        """
        heads, widths = key.shape[2], (key.shape[3], value.shape[3])
        inputs = (query, key, value, decay, *([] if beta is None else [beta]))
        flat = [x.float().reshape(*x.shape[:2], -1) for x in inputs]
        if self.progress is None:
            row = sum(x.shape[2] for x in flat[1:])
            self.tensors.append(StateTensor(layer=self.layer, part="state", shape=[heads, *widths]))
            self.tensors.append(StateTensor(layer=self.layer, part="inputs", shape=[row], history=0))
            return torch.zeros_like(value, dtype=torch.float32)
        past = self.past["state"], self.past["inputs"]
        output, self.present["state"], self.present["inputs"] = symbolic_multi_out(
            f"{DOMAIN}::{RULES[rule]}",
            (*flat, *past, *self.progress.inputs()),
            {"heads": heads, "scale": scale},
            dtypes=(torch.float32,) * 3,
            shapes=(flat[2].shape, past[0].shape, past[1].shape),
            version=1,
        )
        return output.reshape(*output.shape[:2], heads, widths[1])


_active: list[RecurrentStates] = []
"""States of the layer that runs now, if any. transformers' functions are not told which layer calls them."""


class RecurrentLayer(LinearAttentionCacheLayerMixin):
    """The ``Cache`` protocol of one layer; what it would keep is kept by ``states``."""

    def __init__(self, states: RecurrentStates) -> None:
        super().__init__(number_of_states=1)
        self.states = states

    @override
    def lazy_initialization(self, *_args: Any, **_kwargs: Any) -> None:
        """Nothing to do: the tensors are the graph's inputs."""

    @override
    def update_conv_state(self, conv_states: Tensor, state_idx: int = 0, **_kwargs: Any) -> Tensor:
        _active[:] = [self.states]
        return conv_states

    @override
    def update_recurrent_state(self, recurrent_states: Tensor, state_idx: int = 0, **_kwargs: Any) -> Tensor:
        if self.states.progress is None and not any(tensor.part == "state" for tensor in self.states.tensors):
            raise UnsupportedModelError("its recurrent layers update their states by a rule that is not known")
        return recurrent_states


class AnyLayersCache(Cache):
    """A cache whose layers may all be recurrent: transformers' own does not know how long a text is then."""

    @override
    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0  # Positions are given explicitly.

    @override
    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        attending = [layer for layer in self.layers if isinstance(layer, CacheLayerMixin)]
        if not attending:
            return query_length, 0
        chosen = self.layers[layer_idx] if layer_idx < len(self.layers) else attending[0]
        return (chosen if isinstance(chosen, CacheLayerMixin) else attending[0]).get_mask_sizes(query_length)


def causal_conv1d(
    hidden_states: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None, **_kwargs: Any
) -> Tensor:
    """In place of ``causal_conv1d_fn`` for hidden_states [B, C, S] and weight [C, K]."""
    y = _active[0].convolve(hidden_states.to(weight.dtype), weight)
    if bias is not None:
        y = y + bias[:, None]
    if activation is not None:
        y = ACT2FN[activation](y)
    return y.to(hidden_states.dtype)


def gated_delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """In place of ``torch_chunk_gated_delta_rule`` (arXiv 2412.06464) and ``chunk_kimi_delta_attention``.

    The latter has a decay for every channel of the keys (arXiv 2510.26692). The second result is not looked at.
    """
    query, key = query.float(), key.float()
    if use_qk_l2norm_in_kernel:
        query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + L2_EPSILON) for x in (query, key))
    query, key = (_per_head(x, value.shape[2]) for x in (query, key))
    output = _active[0].attend("gated_delta", query, key, value, g, beta, key.shape[-1] ** -0.5)
    return output.to(value.dtype), output


def mamba2_scan(
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    return_final_states: bool = False,
    **_kwargs: Any,
) -> Any:
    """In place of ``mamba2_chunk_scan`` (arXiv 2405.21060), a gated linear attention with C, B, dt x as q, k, v."""
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = functional.softplus(dt)
    dt = torch.clamp(dt, min=dt_limit[0], max=dt_limit[1]).float()
    x, heads = hidden_states.float(), hidden_states.shape[2]
    output = _active[0].attend(
        "gated", _per_head(C, heads), _per_head(B, heads), x * dt[..., None], A.float() * dt, None, 1.0
    )
    if D is not None:
        output = output + D[:, None] * x
    return (output, output) if return_final_states else output


def _per_head(x: Tensor, heads: int) -> Tensor:
    """x [B, S, groups, D] with each group repeated for its heads."""
    return x if x.shape[2] == heads else x.repeat_interleave(heads // x.shape[2], dim=2)


SWAPS: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": causal_conv1d,
    "torch_chunk_gated_delta_rule": gated_delta_rule,
    "chunk_kimi_delta_attention": gated_delta_rule,
    "mamba2_chunk_scan": mamba2_scan,
}
"""Replacements of functions of transformers' modelling files, by name."""


@contextmanager
def recurrent_functions(files: Sequence[Any]) -> Iterator[None]:
    """While active, the modelling ``files`` call the functions above in place of their own."""
    with swapped(
        *((file, name, replacement) for file in files for name, replacement in SWAPS.items() if hasattr(file, name))
    ):
        try:
            yield
        finally:
            _active.clear()
