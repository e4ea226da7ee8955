"""The inputs and outputs of a graph that ONNX Runtime runs, as ``config.json`` describes them."""

from __future__ import annotations

from typing import Literal

import onnx_ir as ir

from specrun.engine_dir.config import Tensor
from specrun.engine_dir.dtypes import DTYPES

_NAMES = {dtype.onnx: dtype.name for dtype in DTYPES.values()}


def describe_io(model: ir.Model) -> list[Tensor]:
    """Names, element types and shapes; a cache output shares the memory of its input."""
    inputs = [_tensor(value, "input") for value in model.graph.inputs]
    return inputs + [_tensor(value, "output") for value in model.graph.outputs]


def _tensor(value: ir.Value, kind: Literal["input", "output"]) -> Tensor:
    name, dtype = str(value.name), _NAMES[int(value.dtype or 0)]
    shape = [size if isinstance(size, int) else str(size) for size in value.shape or ()]
    # A cache output shares the memory of its input.
    alias = None
    for present, past in (("present.", "past_key_values."), ("present_states.", "past_states.")):
        if name.startswith(present):
            alias = name.replace(present, past)
    return Tensor(name=name, kind=kind, dtype=dtype, shape=shape, aliases=alias)
