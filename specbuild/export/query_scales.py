"""Llama 4 makes queries larger behind many tokens, which it counts by its cache's length; here rows have their own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

TUNED, SCALES = "attn_temperature_tuning", "query_scales"


@dataclass
class QueryScales:
    """Of one attention module. A tensor that stood in the module itself would have to be a buffer."""

    of_rows: torch.Tensor | None = None
    """[B, S]: of the pass that is running."""


def scaled(module: nn.Module, query: torch.Tensor) -> torch.Tensor:
    """query [B, H, S, D] times what ``by_position`` found for the attention ``module``."""
    scales: QueryScales | None = getattr(module, SCALES, None)
    if scales is None or scales.of_rows is None:
        return query
    return (query * scales.of_rows[:, None, :, None]).to(query.dtype)


@contextmanager
def by_position(model: nn.Module) -> Iterator[None]:
    """While active, attention leaves the factors to ``scaled``, and every pass finds them from its positions.

    "Scalable-Softmax Is Superior for Attention", arXiv 2501.19399.
    """
    with ExitStack() as undo:
        for layer in model.modules():
            if getattr(layer, TUNED, False) and not getattr(layer, "use_rope", True):
                undo.callback(setattr, layer, TUNED, getattr(layer, TUNED))
                undo.callback(delattr, layer, SCALES)
                setattr(layer, TUNED, False)
                setattr(layer, SCALES, QueryScales())
                undo.callback(layer.register_forward_pre_hook(_find_scales, with_kwargs=True).remove)
        yield


def _find_scales(layer: Any, _args: Any, kwargs: dict[str, Any]) -> None:
    first = kwargs["past_key_values"].write_indices[:, None]
    read = first + torch.arange(kwargs["hidden_states"].shape[1])[None, :] + 1
    layer.query_scales.of_rows = torch.log1p(torch.floor(read.float() / layer.floor_scale)) * layer.attn_scale + 1.0
