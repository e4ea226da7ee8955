"""Tensors that are read in torch, as the readers want them: with names, in types of numpy and ml_dtypes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx_ir.tensor_adapters import TorchTensor, from_torch_dtype

from specbuild.quantized_formats.unpack.stored import Array, Index
from specbuild.weights.lazy_tensors import Reader


@dataclass(frozen=True)
class FromTorch:
    """``tensor`` under its ``name`` in the file."""

    name: str
    tensor: Reader

    @property
    def shape(self) -> tuple[int, ...]:
        """As stored."""
        return self.tensor.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """As stored."""
        return from_torch_dtype(self.tensor.dtype).numpy()

    def read(self, index: Index = ()) -> Array:
        """The values of a part."""
        part = self.tensor.read((*index, *[slice(None)] * (len(self.shape) - len(index))), self.tensor.dtype)
        return TorchTensor(part.contiguous()).numpy()
