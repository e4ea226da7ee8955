"""Weights of heads in pickles, read without running what they may hold."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path

import torch

from specbuild.weights.lazy_tensors import Index, Reader
from specrun.errors import CheckpointError, first_line

PICKLE_NAME = "pytorch_model.bin"


@dataclass(frozen=True)
class LoadedTensor:
    """A tensor of a pickle, mapped from its file."""

    tensor: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """As stored."""
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        """As stored."""
        return self.tensor.dtype

    def read(self, index: Index, dtype: torch.dtype) -> torch.Tensor:
        """A copy of a part in ``dtype``."""
        return self.tensor[index].to(dtype, copy=True)


def read_pickle(path: Path, allowed: bool) -> dict[str, Reader]:
    """The tensors of a file that ``torch.save`` wrote, by name; nothing but tensors is made of it.

    allowed: whether that was asked for. Raises CheckpointError.
    """
    if not allowed:
        raise CheckpointError(
            f"{path.parent}: only pickled weights ({path.name}); --allow_pickle reads them, as tensors alone"
        )
    try:
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, ValueError, OSError, EOFError) as error:
        raise CheckpointError(f"{path}: torch does not read it as plain tensors ({first_line(error)})") from error
    if not isinstance(loaded, dict) or not all(isinstance(value, torch.Tensor) for value in loaded.values()):
        raise CheckpointError(f"{path}: holds something else than named tensors")
    return {str(name): LoadedTensor(tensor) for name, tensor in loaded.items()}
