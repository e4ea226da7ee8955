"""Medusa heads (arXiv 2401.10774): head k proposes the token k + 2 behind the target's last state, in one pass.

Written as FasterDecoding names them, as safetensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import PreTrainedModel
from typing_extensions import override

from specbuild.export.features import Fusion
from specbuild.heads.medusa import ResBlock
from specbuild.json_file import read_json
from specbuild.training.student import Student
from specrun.engine_dir.config import CONFIG_NAME

WEIGHTS = "medusa_lm_head.safetensors"
_LAYERS = 1
"""Residual blocks of each head."""


class FinalState(Fusion):
    """The target's last state behind its final norm, as it is."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.layers, self.names = (), []


class MedusaStudent(Student):
    """The heads in a directory that ``save`` or ``write_new_heads`` has written."""

    def __init__(self, directory: Path, device: torch.device) -> None:
        super().__init__()
        self.source = read_json(directory / CONFIG_NAME)
        tensors = load_file(directory / WEIGHTS)
        self.trained_drafts, layers = self.source["medusa_num_heads"], self.source["medusa_num_layers"]
        vocab_size, width = tensors[f"0.{layers}.weight"].shape
        with torch.device("meta"):
            self.heads = nn.ModuleList(
                nn.Sequential(*(ResBlock(width) for _ in range(layers)), nn.Linear(width, vocab_size, bias=False))
                for _ in range(self.trained_drafts)
            )
        self.heads.load_state_dict({name: tensor.float().clone() for name, tensor in tensors.items()}, assign=True)
        self.heads.requires_grad_(True)
        self.to(device)
        self._final = FinalState()

    @property
    @override
    def fusion(self) -> Fusion:
        """See Student."""
        return self._final

    @override
    def drafts(
        self, ids: torch.Tensor, mask: torch.Tensor, features: torch.Tensor, count: int
    ) -> Iterator[torch.Tensor]:
        """See Student. All heads read the origin's own state."""
        for draft in range(min(count, len(self.heads))):
            yield features[:, : ids.shape[1] - 2 - draft]

    @override
    def logits(self, states: torch.Tensor, draft: int) -> torch.Tensor:
        """See Student."""
        logits: torch.Tensor = self.heads[draft](states)
        return logits

    @override
    def save(self, directory: Path, dtype: torch.dtype) -> None:
        """See Student."""
        tensors = self.heads.state_dict()
        save_file(
            {name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in tensors.items()},
            directory / WEIGHTS,
            metadata={"format": "pt"},
        )
        (directory / CONFIG_NAME).write_text(json.dumps(self.source, indent=2) + "\n")


def write_new_heads(directory: Path, target: PreTrainedModel, name: str, count: int) -> None:
    """``count`` heads that all propose what the target's output layer says. name: the target's, for config.json."""
    output = target.get_output_embeddings()
    assert output is not None
    rows = output.weight.detach().cpu().float()
    width = rows.shape[1]
    tensors = {}
    for head in range(count):
        for layer in range(_LAYERS):
            tensors[f"{head}.{layer}.linear.weight"] = torch.zeros(width, width)
            tensors[f"{head}.{layer}.linear.bias"] = torch.zeros(width)
        tensors[f"{head}.{_LAYERS}.weight"] = rows.clone()
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    config = {
        "medusa_num_heads": count,
        "medusa_num_layers": _LAYERS,
        "base_model_name_or_path": name,
        "hidden_size": width,
        "vocab_size": len(rows),
    }
    (directory / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n")
