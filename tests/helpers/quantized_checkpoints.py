"""Small checkpoints that come quantized."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.families import save_checkpoint

Tensors = dict[str, torch.Tensor]


GROUP = 32


def fp8_blocks(weight: torch.Tensor) -> Tensors:
    """DeepSeek's: float8 with a scale for every 32 x 32."""
    blocks = weight.reshape(weight.shape[0] // GROUP, GROUP, weight.shape[1] // GROUP, GROUP)
    scales = blocks.abs().amax(dim=(1, 3)) / 448
    codes = (blocks / scales[:, None, :, None]).reshape(weight.shape).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale_inv": scales}


def gptq(weight: torch.Tensor) -> Tensors:
    """GPTQ with zero points and the channels' groups in another order (act-order)."""
    inputs = weight.shape[1]
    groups = torch.randperm(inputs, generator=torch.Generator().manual_seed(0)) // GROUP
    low = torch.stack([weight[:, groups == group].amin(1) for group in range(inputs // GROUP)])
    high = torch.stack([weight[:, groups == group].amax(1) for group in range(inputs // GROUP)])
    scales = (high - low) / 15
    zeros = (-low / scales).round().clamp(1, 15)
    codes = (weight.T / scales[groups] + zeros[groups]).round().clamp(0, 15).to(torch.int32)
    return {
        "qweight": in_words(codes, 0),
        "qzeros": in_words((zeros - 1).to(torch.int32), 1),
        "scales": scales,
        "g_idx": groups.to(torch.int32),
    }


def in_words(codes: torch.Tensor, axis: int) -> torch.Tensor:
    """Eight 4-bit codes to an int32, the first in the lowest bits."""
    parts = codes.numpy().astype(np.uint32).swapaxes(0, axis)
    words = np.zeros((len(parts) // 8, *parts.shape[1:]), np.uint32)
    for place in range(8):
        words |= parts[place::8] << np.uint32(4 * place)
    return torch.from_numpy(np.ascontiguousarray(words.swapaxes(0, axis)).view(np.int32))


FORMATS: dict[str, tuple[Callable[[torch.Tensor], Tensors], dict[str, Any], str]] = {
    "fp8": (fp8_blocks, {"quant_method": "fp8", "weight_block_size": [GROUP, GROUP]}, "float8"),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True, "sym": False}, "uint4"),
}


def quantized_checkpoint(directory: Path, method: str) -> Path:
    """A small Llama whose layers' products are packed."""
    save_checkpoint(directory, "llama3", intermediate_size=128)
    pack, section, _ = FORMATS[method]
    tensors: Tensors = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        if "_proj." in name:
            packed = pack(tensor.float())
            tensors |= {f"{name.removesuffix('weight')}{suffix}": part.contiguous() for suffix, part in packed.items()}
        else:
            tensors[name] = tensor
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": section}))
    return directory
