"""Mixtures of experts without data-dependent shapes, which transformers' own implementations have.

transformers looks the function up by name (``ALL_EXPERTS_FUNCTIONS``). ``used_experts`` finds the nodes by their marks.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.onnx.ops import symbolic

from specbuild.graph import ops as graphs

IMPLEMENTATION = "specbuild_dense"
"""The name under which the function is registered."""


def dense_experts(self: torch.nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Every expert on every token, weighted by the router.

    hidden_states [T, H], top_k_index and top_k_weights [T, k] -> [T, H]. transformers' experts modules keep
    their weights as [E, out, in], or [E, in, out] where ``is_transposed``.
    """
    experts: Any = self
    routing = torch.zeros(hidden_states.shape[0], experts.num_experts, dtype=top_k_weights.dtype)
    routing = routing.scatter(1, top_k_index, top_k_weights)

    def linear(x: Tensor, name: str, mark: str) -> Tensor:
        weight = getattr(experts, name)
        weight = weight if experts.is_transposed else weight.transpose(1, 2)
        y = _marked("MatMul", (x, weight), (weight.shape[0], x.shape[1], weight.shape[2]), mark)
        return _marked("Add", (y, getattr(experts, f"{name}_bias")[:, None, :]), y.shape) if experts.has_bias else y

    states = hidden_states[None]
    if experts.has_gate:
        inner = experts._apply_gate(linear(states, "gate_up_proj", graphs.EXPERTS_FIRST))
    else:
        inner = experts.act_fn(linear(states, "up_proj", graphs.EXPERTS_FIRST))
    outputs = linear(inner, "down_proj", graphs.EXPERTS_PART)
    weighted = _marked("Mul", (outputs, routing.transpose(0, 1)[:, :, None].to(outputs.dtype)), outputs.shape)
    total = _marked("ReduceSum", (weighted, torch.tensor([0])), outputs.shape[1:], graphs.EXPERTS_SUM, keepdims=0)
    return total.to(hidden_states.dtype)


def _marked(
    op_type: str,
    inputs: tuple[Tensor, Tensor],
    shape: torch.Size | tuple[int, ...],
    mark: str = graphs.EXPERTS_PART,
    **attributes: Any,
) -> Tensor:
    """One ONNX node of the inputs' type, that ``used_experts`` can find."""
    return symbolic(
        op_type, inputs, attributes, dtype=inputs[0].dtype, shape=shape, metadata_props={graphs.EXPERTS: mark}
    )
