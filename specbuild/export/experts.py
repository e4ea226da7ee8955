"""Mixtures of experts without data-dependent shapes, which transformers' own implementations have.

transformers looks the function up by name (``ALL_EXPERTS_FUNCTIONS``). Compilers find the nodes by their marks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.onnx.ops import symbolic

from specbuild.export.swaps import Swap
from specbuild.graph import ops as graphs

IMPLEMENTATION = "specbuild_dense"
"""The name under which the function is registered."""


def dense_experts(self: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Every expert on every token, weighted by the router.

    hidden_states [T, H], top_k_index and top_k_weights [T, k] -> [T, H]. transformers' experts modules keep
    their weights as [E, out, in], or [E, in, out] where ``is_transposed``.
    """
    experts: Any = self
    states, mark = hidden_states[None], graphs.EXPERTS_FIRST
    if experts.has_gate:
        inner = experts._apply_gate(_linear(experts, states, "gate_up_proj", mark))
    else:
        inner = experts.act_fn(_linear(experts, states, "up_proj", mark))
    outputs = _linear(experts, inner, "down_proj", graphs.EXPERTS_PART)
    total = _weighted_sum(outputs, _routing(outputs, top_k_index, top_k_weights))
    return total.to(hidden_states.dtype)


def scaled_inputs(self: nn.Module, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    """The same for a mixture that scales what experts read by the router's scores, beside a shared expert (Llama 4)."""
    mixture: Any = self
    states = hidden_states.reshape(-1, hidden_states.shape[-1])
    all_scores, logits = mixture.router(states)
    scores, chosen = all_scores.topk(mixture.top_k, dim=1)
    experts, count = mixture.experts, mixture.experts.gate_up_proj.shape[0]
    routing = _routing(states.expand(count, -1, -1), chosen, scores)
    scaled = _marked("Mul", (states[None], routing), (count, *states.shape))
    gate, up = _linear(experts, scaled, "gate_up_proj", graphs.EXPERTS_PART).chunk(2, dim=-1)
    outputs = _linear(experts, up * experts.act_fn(gate), "down_proj", graphs.EXPERTS_PART)
    total = _weighted_sum(outputs, _routing(outputs, chosen, torch.ones_like(scores)))
    return mixture.shared_expert(states) + total, logits


def expert_swaps(model: nn.Module) -> list[Swap]:
    """What stands during the export in mixtures of ``model`` that transformers has no function by name for."""
    kinds = {type(part) for part in model.modules() if _scales_inputs(part)}
    return [(kind, "forward", scaled_inputs) for kind in kinds]


def _scales_inputs(part: nn.Module) -> bool:
    experts = getattr(part, "experts", None)
    names = ("router", "shared_expert", "top_k")
    return all(hasattr(part, name) for name in names) and hasattr(experts, "gate_up_proj") and _is_transposed(experts)


def _is_transposed(experts: Any) -> bool:
    """Whether weights are [E, in, out]; those that transformers' functions do not know always are."""
    return bool(getattr(experts, "is_transposed", True))


def _linear(experts: Any, x: Tensor, name: str, mark: str) -> Tensor:
    weight = getattr(experts, name)
    weight = weight if _is_transposed(experts) else weight.transpose(1, 2)
    y = _marked("MatMul", (x, weight), (weight.shape[0], x.shape[1], weight.shape[2]), mark)
    has_bias = getattr(experts, "has_bias", False)
    return _marked("Add", (y, getattr(experts, f"{name}_bias")[:, None, :]), y.shape) if has_bias else y


def _routing(like: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """What each expert's result ``like`` [E, T, H] is multiplied by: [E, T, 1], 0 where a token has not chosen it."""
    weights = torch.zeros(like.shape[1], like.shape[0], dtype=top_k_weights.dtype)
    return weights.scatter(1, top_k_index, top_k_weights).transpose(0, 1)[:, :, None].to(like.dtype)


def _weighted_sum(outputs: Tensor, routing: Tensor) -> Tensor:
    """outputs [E, T, H] -> [T, H]."""
    weighted = _marked("Mul", (outputs, routing), outputs.shape)
    return _marked("ReduceSum", (weighted, torch.tensor([0])), outputs.shape[1:], graphs.EXPERTS_SUM, keepdims=0)


def _marked(
    op_type: str,
    inputs: tuple[Tensor, Tensor],
    shape: torch.Size | tuple[int, ...],
    mark: str = graphs.EXPERTS_PART,
    **attributes: Any,
) -> Tensor:
    """One ONNX node of the inputs' type, that compilers can find."""
    return symbolic(
        op_type, inputs, attributes, dtype=inputs[0].dtype, shape=shape, metadata_props={graphs.EXPERTS: mark}
    )
