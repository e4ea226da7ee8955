"""Tensors that are read in torch, as the readers want them: with names, in types of numpy and ml_dtypes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import ml_dtypes
import numpy as np

from specbuild.quantized_formats.unpack.stored import Array, Index

if TYPE_CHECKING:
    import torch

_SPECIAL: dict[str, Any] = {
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "float8_e8m0fnu": ml_dtypes.float8_e8m0fnu,
    "bool": np.bool_,
}
"""Types that numpy does not have by torch's name."""


class _TorchTensor(Protocol):
    """``specbuild.weights.lazy_tensors.StoredTensor``."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def read(self, index: Index, dtype: torch.dtype) -> torch.Tensor: ...


@dataclass(frozen=True)
class FromTorch:
    """``tensor`` under its ``name`` in the file."""

    name: str
    tensor: _TorchTensor

    @property
    def shape(self) -> tuple[int, ...]:
        """As stored."""
        return self.tensor.shape

    @property
    def dtype(self) -> np.dtype[Any]:
        """As stored."""
        name = str(self.tensor.dtype).removeprefix("torch.")
        found: np.dtype[Any] = np.dtype(_SPECIAL.get(name, name))
        return found

    def read(self, index: Index = ()) -> Array:
        """The values of a part."""
        import torch

        part = self.tensor.read((*index, *[slice(None)] * (len(self.shape) - len(index))), self.tensor.dtype)
        data = part.contiguous().reshape(-1).view(torch.uint8).numpy()
        return data.view(self.dtype).reshape(part.shape)
