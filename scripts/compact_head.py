"""A draft head's checkpoint in a smaller file: ``python -m scripts.compact_head HEAD NEW_HEAD``.

Matrices get 8 bits in groups of 64 input channels, as compressed-tensors stores them (int-quantized). ``specbuild
convert --head_of`` reads them as dense ones.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import click
import torch
from safetensors.torch import load_file, save_file

from specbuild.quantization.rounding import round_weight

GROUP = 64
SCHEME = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP},
        }
    },
    "ignore": [],
}


@click.command()
@click.argument("head", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("new_head", type=click.Path(path_type=Path))
def main(head: Path, new_head: Path) -> None:
    """Write HEAD with matrices in 8 bits to NEW_HEAD."""
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(head / "model.safetensors").items():
        if tensor.dim() != 2 or not tensor.is_floating_point():
            tensors[name] = tensor
            continue
        rounded = round_weight(tensor.bfloat16(), "int8", GROUP)
        module = name.removesuffix(".weight")
        tensors[name] = torch.from_numpy(rounded.codes.T.copy())
        scales = torch.from_numpy(rounded.scales.astype("float32")).bfloat16()
        tensors[f"{module}.weight_scale"] = scales.T.contiguous()
    new_head.mkdir(parents=True)
    save_file(tensors, new_head / "model.safetensors")
    config = json.loads((head / "config.json").read_text())
    (new_head / "config.json").write_text(json.dumps({**config, "quantization_config": SCHEME}, indent=2) + "\n")
    for name in ("training.json",):
        if (head / name).is_file():
            shutil.copyfile(head / name, new_head / name)


if __name__ == "__main__":
    main()
