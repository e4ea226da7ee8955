"""Spares ``torch.onnx`` another run of programs whose operators convert no types by themselves.

Before ``torch.onnx`` translates a program, it runs all of it anew, on tensors without contents, and makes explicit what
an operator converts before it computes. Torch's rules tell beforehand that most programs have nothing of the kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from specbuild.export.swaps import swapped

_TypeOfNumber = Callable[[type], torch.dtype | None]
"""The type that ``torch.onnx`` takes a number for, by its class."""


@contextmanager
def promoted_where_needed() -> Iterator[None]:
    """While it is open, ``torch.onnx`` runs those programs alone in which a type is converted."""
    try:
        from torch.onnx._internal.exporter import _fx_passes
        from torch.onnx._internal.fx.passes.type_promotion import TypePromotionTable, get_type_promotion_rule
        from torch.onnx._internal.fx.type_utils import from_scalar_type_to_torch_dtype

        promote = _fx_passes.insert_type_promotion_nodes
    except (ImportError, AttributeError):  # Another release of torch has other internals; it takes the longer way.
        yield
        return
    table = TypePromotionTable()

    def promote_if_needed(graph_module: fx.GraphModule) -> None:
        graphs = [module.graph for module in graph_module.modules() if isinstance(module, fx.GraphModule)]
        for node in [node for graph in graphs for node in graph.nodes]:
            rule = get_type_promotion_rule(node, table)
            if rule and _is_converted(node, rule, from_scalar_type_to_torch_dtype):
                promote(graph_module)
                return

    with swapped((_fx_passes, "insert_type_promotion_nodes", promote_if_needed)):
        yield


def _is_converted(node: fx.Node, rule: Any, type_of: _TypeOfNumber) -> bool:
    """Whether the operator converts one of its inputs. rule: torch's, for this operator."""
    args: Any = fx.map_arg(node.args, lambda value: value.meta["val"])
    kwargs: Any = fx.map_arg(node.kwargs, lambda value: value.meta["val"])
    wanted = rule.preview_type_promotion(args, kwargs)
    inputs = [(args[index], dtype) for index, dtype in wanted.args_dtypes.items()]
    inputs += [(kwargs[name], dtype) for name, dtype in wanted.kwargs_dtypes.items()]
    return not all(dtype is None or _has_type(value, dtype, type_of) for value, dtype in inputs)


def _has_type(value: Any, dtype: torch.dtype, type_of: _TypeOfNumber) -> bool:
    if isinstance(value, list | tuple):
        return all(_has_type(item, dtype, type_of) for item in value)
    return (value.dtype if isinstance(value, torch.Tensor) else type_of(type(value))) == dtype
