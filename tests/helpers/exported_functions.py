"""Functions of one tensor, exported as models are, beside torch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import nn
from torch.export import Dim

from specbuild.export.decompositions import decomposed_where_needed
from specbuild.export.type_promotion import promoted_where_needed
from specrun.backends.ort_session import session_options

Function = Callable[[torch.Tensor], Any]


class Module(nn.Module):
    """A function as a module."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> Any:
        """Call it."""
        return self.function(x)


def difference(function: Function, path: Path) -> float:
    """The largest difference between torch and ONNX Runtime on the exported function. x: float32 [3, 4], 0.5 to 2."""
    x = torch.from_numpy(np.random.default_rng(0).uniform(0.5, 2.0, (3, 4)).astype(np.float32))
    with torch.no_grad(), decomposed_where_needed(), promoted_where_needed():
        program = torch.export.export(Module(function), (x,), dynamic_shapes=({0: Dim("rows", min=1)},), strict=False)
        exported = torch.onnx.export(program, (), opset_version=23, optimize=False, verbose=False)
        expected = function(x.clone())
    assert exported is not None
    ir.save(exported.model, path)
    ort, options = session_options()
    session = ort.InferenceSession(path, options)
    found = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    outputs = expected if isinstance(expected, tuple) else (expected,)
    return max(float(np.abs(one - other.numpy()).max()) for one, other in zip(found, outputs, strict=True))
