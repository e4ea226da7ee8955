"""What a transformers model calls instead of its own attention, mask, cache and experts while it is exported.

transformers looks these up by name (``AttentionInterface``, ``AttentionMaskInterface``, ``ALL_EXPERTS_FUNCTIONS``,
the ``Cache`` protocol), so no modelling code is copied or patched for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from onnx_ir.tensor_adapters import from_torch_dtype
from torch import Tensor
from torch.onnx.ops import symbolic
from transformers import AttentionInterface
from transformers.cache_utils import CacheLayerMixin, DummyLayer
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import AttentionMaskInterface
from typing_extensions import override

from specbuild.export import experts
from specbuild.export.query_scales import scaled
from specbuild.export.recurrent import AnyLayersCache, RecurrentLayer, RecurrentStates
from specbuild.weights.kv_cache import CacheRounding, TensorRounding

IMPLEMENTATION = "specbuild_onnx"
"""The name under which attention and mask are registered with transformers."""


def scatter(past: Tensor, new: Tensor, write_indices: Tensor) -> Tensor:
    """``past`` [B, H, S_max, D] with ``new`` [B, H, S, D] from position ``write_indices`` [B] on, in place."""
    attributes: dict[str, Any] = {"axis": -2, "mode": "linear"}
    inputs = (past, new.to(past.dtype), write_indices)
    return symbolic("TensorScatter", inputs, attributes, dtype=past.dtype, shape=past.shape, version=24)


class ScatterLayer(CacheLayerMixin):
    """One layer's cache: a static tensor [B, H_kv, S_max, D] that ``TensorScatter`` updates in place.

    In 8 bits new keys and values are rounded first, and all are dequantized for attention. So they are the same numbers
    in the pass that writes them and in later ones.
    """

    def __init__(
        self,
        key: Tensor,
        value: Tensor,
        write_indices: Tensor,
        rounding: tuple[TensorRounding, TensorRounding] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.keys, self.values = key, value
        self.rounding = rounding
        self.write_indices = write_indices
        self.is_initialized = True

    @override
    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: the tensors are the graph's inputs."""

    keys: Tensor
    values: Tensor

    @override
    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        if self.rounding is None:
            self.keys = scatter(self.keys, key_states, self.write_indices)
            self.values = scatter(self.values, value_states, self.write_indices)
            return self.keys, self.values
        key_rounding, value_rounding = self.rounding
        keys = _quantized(key_states, key_rounding, self.keys.dtype)
        values = _quantized(value_states, value_rounding, self.values.dtype)
        self.keys = scatter(self.keys, keys, self.write_indices)
        self.values = scatter(self.values, values, self.write_indices)
        return (
            _dequantized(self.keys, key_rounding, key_states.dtype),
            _dequantized(self.values, value_rounding, value_states.dtype),
        )

    @override
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.keys.shape[-2], 0

    @override
    def get_seq_length(self) -> int:
        return 0  # Positions are given explicitly; no model may derive them from the cache.

    @override
    def get_max_length(self) -> int:
        return self.keys.shape[-2]


class ScatterAndRecurrentLayer(RecurrentLayer, ScatterLayer):  # type: ignore[override]
    """A layer with both: attention and a recurrent part in parallel (Falcon-H1)."""

    def __init__(self, states: RecurrentStates, *attention: Any) -> None:
        """attention: as ``ScatterLayer`` takes it."""
        ScatterLayer.__init__(self, *attention)
        RecurrentLayer.__init__(self, states)

    lazy_initialization = ScatterLayer.lazy_initialization  # type: ignore[assignment]
    get_max_length = ScatterLayer.get_max_length


class ScatterCache(AnyLayersCache):
    """The whole cache; ``past`` is [key_0, value_0, key_1, value_1, ...]."""

    def __init__(
        self,
        past: list[Tensor],
        write_indices: Tensor,
        rounding: CacheRounding | None = None,
        recurrent: Mapping[int, RecurrentStates] = MappingProxyType({}),
        attending: Sequence[int] | None = None,
    ) -> None:
        """recurrent: what layers keep that are recurrent. attending: those that keep keys and values; None: all."""
        pairs = list(zip(past[0::2], past[1::2], strict=True))
        numbers = range(len(pairs)) if attending is None else attending
        by_layer: dict[int, Any] = {layer: RecurrentLayer(states) for layer, states in recurrent.items()}
        for number, (layer, pair) in enumerate(zip(numbers, pairs, strict=True)):
            attention = (*pair, write_indices, rounding.layer(number) if rounding else None)
            states = recurrent.get(layer)
            by_layer[layer] = ScatterAndRecurrentLayer(states, *attention) if states else ScatterLayer(*attention)
        self.scatter_layers: list[ScatterLayer] = [by_layer[layer] for layer in numbers]
        super().__init__(layers=[by_layer.get(layer) or DummyLayer() for layer in range(max(by_layer, default=-1) + 1)])
        self.write_indices = write_indices

    @override
    def get_query_offset(self, layer_idx: int = 0) -> Tensor:  # type: ignore[override]
        return self.write_indices

    def present(self) -> list[Tensor]:
        return [tensor for layer in self.scatter_layers for tensor in (layer.keys, layer.values)]


def _quantized(new: Tensor, rounding: TensorRounding, dtype: torch.dtype) -> Tensor:
    """The codes of new keys or values; see ``quantization.kv_cache``."""
    wide = new.float()
    if rounding.is_scaled:
        wide = wide / torch.from_numpy(rounding.factors)[:, None]
    constants = (torch.tensor(rounding.scale), torch.zeros((), dtype=dtype))
    return symbolic("QuantizeLinear", (wide, *constants), dtype=dtype, shape=new.shape, version=24)


def _dequantized(codes: Tensor, rounding: TensorRounding, dtype: torch.dtype) -> Tensor:
    """What codes say, but for the factors."""
    constants = (torch.tensor(rounding.scale), torch.zeros((), dtype=codes.dtype))
    attributes: Any = {} if dtype == torch.float32 else {"output_dtype": int(from_torch_dtype(dtype))}
    return symbolic("DequantizeLinear", (codes, *constants), attributes, dtype=dtype, shape=codes.shape, version=24)


def _times_factors(states: Tensor, rounding: TensorRounding) -> Tensor:
    """states [B, H, S, D] times the factors [H_kv, D] of the key-value heads that heads share."""
    if not rounding.is_scaled:
        return states
    factors = torch.from_numpy(rounding.factors.repeat(states.shape[1] // len(rounding.factors), axis=0))
    return states * factors[:, None].to(states.dtype)


def contract_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Tensor,
    mask_function: Callable[..., Tensor],
    **_kwargs: Any,
) -> Tensor:
    """The model's own mask rule on index tensors: bool [B, 1, S, S_max], True where a key is seen.

    HF's mask functions compare indices, so sliding windows and chunks need no code here. ``q_offset`` is
    ``write_indices`` [B], which gives every row its own positions.
    """
    rows = torch.arange(batch_size)[:, None, None, None]
    heads = torch.zeros(1, dtype=torch.int64)[None, :, None, None]
    queries = (torch.arange(q_length)[None, :] + q_offset[:, None])[:, None, :, None]
    keys = torch.arange(kv_length)[None, None, None, :]
    return mask_function(rows, heads, queries, keys)


def contract_attention(
    roundings: Mapping[int, tuple[TensorRounding, TensorRounding]],
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention over the whole cache under an explicit boolean mask.

    query [B, H, S, D], key and value [B, H_kv, S_max, D], mask bool [B, 1, S, S_max] -> [B, S, H, D].
    One ONNX ``Attention`` node; soft-capped scores, attention sinks, and keys wider than values (multi-head latent
    attention), which TensorRT refuses, are spelled out. roundings: of a layer's keys and values, by its number.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    query = scaled(module, query)
    factors = roundings[int(getattr(module, "layer_idx"))] if roundings else None  # noqa: B009 (not in Module)
    if factors:
        query = _times_factors(query, factors[0])
    if softcap is not None or s_aux is not None or key.shape[-1] != value.shape[-1]:
        output = _plain_attention(query, key, value, attention_mask, scale, softcap, s_aux)
    else:
        output = symbolic(
            "Attention",
            (query, key, value, attention_mask),
            {"scale": float(scale)},
            dtype=query.dtype,
            shape=(*query.shape[:-1], value.shape[-1]),
            version=24,
        )
    if factors:
        output = _times_factors(output, factors[1])
    return output.transpose(1, 2).contiguous(), None


def _plain_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float, softcap: float | None, sinks: Tensor | None
) -> Tensor:
    """Attention as MatMul and an fp32 softmax, with optional soft cap (Gemma 2) and sinks [H] (GPT-OSS).

    Engines for CPUs find it by the pattern in ``graph.attention_layers``.
    """
    batch, heads, length, width = query.shape
    kv_heads = key.shape[1]
    grouped = query.reshape(batch, kv_heads, heads // kv_heads, length, width)
    scores = torch.matmul(grouped, key[:, :, None].transpose(-1, -2)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.float().masked_fill(~mask[:, :, None], torch.finfo(torch.float32).min)
    if sinks is not None:
        column = sinks.float().reshape(1, kv_heads, heads // kv_heads, 1, 1).expand(batch, -1, -1, length, 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = torch.softmax(scores, dim=-1)
    if sinks is not None:
        weights = weights[..., :-1]
    output = torch.matmul(weights.to(value.dtype), value[:, :, None])
    return output.reshape(batch, heads, length, value.shape[-1])


def register(rounding: CacheRounding | None = None, attending: Sequence[int] = ()) -> None:
    """Make the functions above selectable by name. rounding: of the cache of the layers ``attending``."""
    roundings = {layer: rounding.layer(number) for number, layer in enumerate(attending)} if rounding else {}
    AttentionInterface.register(IMPLEMENTATION, partial(contract_attention, roundings))
    AttentionMaskInterface.register(IMPLEMENTATION, contract_mask)
    ALL_EXPERTS_FUNCTIONS.register(experts.IMPLEMENTATION, experts.dense_experts)


def gather_logits_positions(hidden_states: Tensor, logits_to_keep: Tensor) -> Tensor:
    """``hidden_states`` [B, S, H] at ``logits_to_keep`` [B, K] -> [B, K, H]; HF's own version fixes the batch size."""
    index = logits_to_keep[:, :, None].expand(-1, -1, hidden_states.shape[-1])
    return torch.gather(hidden_states, 1, index)


def gather_features(features: Tensor, positions: Tensor) -> Tensor:
    """``features`` [B, 1, S_max, W] at ``positions`` [B, K] -> [B, K, W]. Nothing else of them is touched."""
    index = positions[:, None, :, None].expand(-1, -1, -1, features.shape[-1])
    return torch.gather(features, 2, index)[:, 0]
