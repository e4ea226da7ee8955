"""What all kinds of drafts are to the trainer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from specbuild.export.features import Fusion
from specbuild.weights.lazy_tensors import Reader


class Student(nn.Module, ABC):
    """A draft that is being trained; its parameters are float32.

    Drafts are counted from *origins*. At origin i the text is known up to token i + 1, and the target has read it up to
    token i. Draft k, from 0, is for token i + 2 + k; the target's logits for it stand at i + 1 + k.
    """

    vocabulary: Tensor | None = None
    """[V_draft] int64: the tokens that it may draft, ascending; None: all."""
    trained_drafts: int
    """Number of drafts of each origin that are trained."""

    fusion: Fusion | None
    """Makes features of the target's hidden states; None: it reads none."""

    @abstractmethod
    def drafts(self, ids: Tensor, mask: Tensor, features: Tensor, count: int) -> Iterator[Tensor]:
        """States of drafts 0, 1, .. ``count`` - 1: the k-th [B, S - 2 - k, ..], of the first origins.

        ids and mask [B, S]; features [B, S, W], those of ``fusion``. All but the origin's first draft are computed
        behind the text's own tokens, as if they had been drafted.
        """

    @abstractmethod
    def logits(self, states: Tensor) -> Tensor:
        """States [n, ..] of drafts -> [n, V_draft]."""

    @abstractmethod
    def save(self, directory: Path, dtype: torch.dtype) -> None:
        """Write it into a directory as others read it. dtype: of its floats."""

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The parameters that are trained, by name."""
        return {name: parameter for name, parameter in self.named_parameters() if parameter.requires_grad}


def materialise(owner: nn.Module, name: str, reader: Reader) -> None:
    """Put a float32 parameter in the place of a placeholder."""
    module, _, last = name.rpartition(".")
    whole = reader.read((slice(None),) * len(reader.shape), torch.float32)
    owner.get_submodule(module).register_parameter(last, nn.Parameter(whole))
