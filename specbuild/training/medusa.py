"""Medusa heads (arXiv 2401.10774): head k proposes the token k + 2 behind the target's last state, in one pass.

Written as FasterDecoding names them, as safetensors.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from typing_extensions import override

from specbuild.export.features import Fusion
from specbuild.files import read_json
from specbuild.head_formats.detect import read_head
from specbuild.head_formats.medusa import FILE_NAME, MedusaHead
from specbuild.heads.medusa import Medusa
from specbuild.training.student import Student, materialise
from specrun.engine_dir.config import CONFIG_NAME

_LAYERS = 1
"""Residual blocks of each head."""


class MedusaStudent(Student):
    """The heads in a directory that ``save`` or ``write_new_heads`` has written."""

    def __init__(self, directory: Path, target: PreTrainedModel) -> None:
        super().__init__()
        self.source, head = read_json(directory / CONFIG_NAME), read_head(directory)
        assert isinstance(head, MedusaHead)
        self.trained_drafts, self.fusion = head.num_heads, Fusion(head, target)
        self.heads = Medusa(head, torch.float32, head.vocab_size)
        for name, tensor in head.tensors.items():
            materialise(self.heads, name, tensor)
        self.to(target.device)

    @override
    def drafts(self, ids: Tensor, mask: Tensor, features: Tensor, count: int) -> Iterator[Tensor]:
        """All heads read the origin's own state."""
        for draft in range(min(count, len(self.heads))):
            yield features[:, : ids.shape[1] - 2 - draft]

    @override
    def logits(self, states: Tensor, draft: int) -> Tensor:
        logits: Tensor = self.heads[draft](states)
        return logits

    @override
    def save(self, directory: Path, dtype: torch.dtype) -> None:
        tensors = {name: tensor.to("cpu", dtype).contiguous() for name, tensor in self.heads.state_dict().items()}
        save_file(tensors, directory / FILE_NAME, metadata={"format": "pt"})
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
    save_file(tensors, directory / FILE_NAME, metadata={"format": "pt"})
    config = {
        "medusa_num_heads": count,
        "medusa_num_layers": _LAYERS,
        "base_model_name_or_path": name,
        "hidden_size": width,
        "vocab_size": len(rows),
    }
    (directory / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n")
