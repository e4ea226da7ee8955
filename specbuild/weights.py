"""Weight files: all that can be wrong with them is found before they are read; and whether weights are numbers."""

from __future__ import annotations

import json
import math
import operator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from specbuild.json_file import read_json
from specrun.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
_LONGEST_HEADER = 100_000_000
"""Bytes of a safetensors header; the library's own limit."""
_CHUNK = 1 << 24
"""Weights that are looked at at a time."""


class Weights(NamedTuple):
    """What a checkpoint's weight files hold."""

    nbytes: int
    tensors: int


def check_weights(directory: Path) -> Weights:
    """Check that all weight files are safetensors, present and whole. Raises CheckpointError."""
    index = directory / "model.safetensors.index.json"
    single = directory / "model.safetensors"
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{index}: no 'weight_map'; download the checkpoint again")
        if bad := [name for name in weight_map.values() if not isinstance(name, str) or Path(name).name != name]:
            raise CheckpointError(f"{index}: shard {bad[0]!r} is not a plain file name; refusing to leave {directory}")
        shards = [directory / name for name in sorted(set(weight_map.values()))]
    elif single.is_file():
        shards = [single]
    else:
        pickles = sorted(path.name for pattern in _PICKLES for path in directory.glob(pattern))
        if pickles:
            raise CheckpointError(
                f"{directory}: only pickled weights ({pickles[0]}), which can run code when read; convert them "
                "where you trust them: "
                "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR) writes safetensors"
            )
        raise CheckpointError(
            f"{directory}: no model.safetensors and no model.safetensors.index.json; the checkpoint has no weights"
        )
    tensors = sum(_check_shard(shard) for shard in shards)
    return Weights(sum(shard.stat().st_size for shard in shards), tensors)


def require_layers(source: Path, config: PreTrainedConfig, weights: Weights) -> None:
    """Raise CheckpointError where there are more layers than tensors: building them could take hours."""
    layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    if isinstance(layers, int) and layers > weights.tensors:
        raise CheckpointError(
            f"{source / 'config.json'}: num_hidden_layers {layers}, and the weight files hold {weights.tensors} "
            "tensors in all; the checkpoint does not fit its config.json"
        )


def _check_shard(path: Path) -> int:
    """The safetensors header promises how long the file is; hold it to that. Returns how many tensors there are."""
    if not path.is_file():
        raise CheckpointError(
            f"{path}: missing, though model.safetensors.index.json lists it; download the checkpoint again"
        )
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise CheckpointError(
                f"{path}: {size} bytes, too short for its safetensors header; it is empty or truncated: download "
                "it again"
            )
        try:
            if length > _LONGEST_HEADER:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(file.read(length))
            ends = [
                operator.index(entry["data_offsets"][1]) for name, entry in header.items() if name != "__metadata__"
            ]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            raise CheckpointError(f"{path}: not a safetensors file (unreadable header); download it again") from error
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        raise CheckpointError(
            f"{path}: {size} bytes, its header says {expected}; it is truncated or altered: download it again"
        )
    return len(ends)


def require_finite(model: PreTrainedModel, source: Path) -> None:
    """Raise CheckpointError, naming the tensor, where a weight is NaN or infinite."""
    import torch

    for name, parameter in model.named_parameters():
        flat = parameter.detach().reshape(-1)
        for part in torch.split(flat, _CHUNK):
            if part.is_floating_point() and not all(math.isfinite(end) for end in torch.aminmax(part)):
                raise CheckpointError(
                    f"{source}: the weights in {name} are not finite (NaN or inf); download them again"
                )
