"""Checkpoints of any size, made in no time: of zeros that are holes in the files, or of random numbers repeated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.core_model_loading import revert_weight_conversion

_POOL = 1 << 22
"""Random numbers that are repeated."""
_NAMES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def write_checkpoint(directory: Path, config: PreTrainedConfig, dtype: torch.dtype, random: bool = False) -> int:
    """Write a checkpoint in ``directory``, with the names that the family's checkpoints have. Returns its bytes.

    Vectors are ones. Matrices are zeros that take no room on the disk, or ``random``.
    """
    directory.mkdir(parents=True)
    config.dtype = dtype
    config.save_pretrained(directory)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    nn.Module.to(model, dtype)
    tied = model.all_tied_weights_keys
    tensors = {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
    tensors = revert_weight_conversion(model, tensors)
    header: dict[str, Any] = {}
    size = 0
    for name, tensor in tensors.items():
        end = size + tensor.nbytes
        header[name] = {"dtype": _NAMES[dtype], "shape": list(tensor.shape), "data_offsets": [size, end]}
        size = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    numbers = (torch.randn(_POOL, generator=torch.Generator().manual_seed(0)) * 0.02).to(dtype)
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        start = file.tell()
        file.truncate(start + size)
        for name, tensor in tensors.items():
            file.seek(start + header[name]["data_offsets"][0])
            if tensor.dim() == 1:
                file.write(_bytes(torch.ones(tensor.shape, dtype=dtype)))
            elif random:
                for done in range(0, tensor.numel(), _POOL):
                    file.write(_bytes(numbers[: tensor.numel() - done]))
    return start + size


def _bytes(tensor: torch.Tensor) -> memoryview:
    numbers: Any = tensor.view(torch.uint8).numpy()
    return memoryview(numbers)
