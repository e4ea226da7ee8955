"""Weight files: what they hold, and all that can be wrong with them, found before they are read."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from specbuild.files import read_json
from specbuild.weights.gguf_file import read_gguf
from specrun.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

INDEX_NAME, SINGLE_NAME = "model.safetensors.index.json", "model.safetensors"
GGUF_NAME, GGUF_INDEX_NAME = "model.gguf", "model.gguf.index.json"
"""Quantized tensors of a GGUF file, and their names there by those that the model gives them."""
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
LONGEST_HEADER = 100_000_000
"""Bytes of a safetensors header; the library's own limit."""


class Entry(NamedTuple):
    """Where a tensor lies."""

    file: Path
    offset: int
    """Offset of its first byte in the file."""
    shape: tuple[int, ...]
    dtype: str
    """The dtype's name in safetensors."""


class Weights(NamedTuple):
    """What a checkpoint's weight files hold."""

    nbytes: int
    entries: dict[str, Entry]
    """Entries by the names that the files give."""
    metadata: dict[str, str]
    """Texts in the header of a single file."""


def check_weights(directory: Path) -> Weights:
    """Check that all weight files are safetensors, present and whole. Raises CheckpointError."""
    index, single = directory / INDEX_NAME, directory / SINGLE_NAME
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
        raise no_weights(directory, file_names(directory))
    parts = [check_file(shard) for shard in shards]
    if (directory / GGUF_INDEX_NAME).is_file():
        parts.append(_check_gguf(directory))
    return Weights(sum(part.nbytes for part in parts), {k: v for part in parts for k, v in part.entries.items()}, {})


def _check_gguf(directory: Path) -> Weights:
    """Quantized tensors as bytes [rows, bytes of a row]. Raises CheckpointError."""
    index, file = directory / GGUF_INDEX_NAME, read_gguf(directory / GGUF_NAME)
    names = read_json(index).get("weight_map")
    if not isinstance(names, dict) or not all(name in file.tensors for name in names.values()):
        raise CheckpointError(f"{index}: names tensors that {file.path} does not have; remove {directory}")
    tensors = {name: file.tensors[stored] for name, stored in names.items()}
    entries = {
        name: Entry(file.path, tensor.offset, (tensor.nbytes // tensor.row_bytes, tensor.row_bytes), "U8")
        for name, tensor in tensors.items()
    }
    return Weights(sum(tensor.nbytes for tensor in tensors.values()), entries, {})


def no_weights(directory: Path, names: Iterable[str]) -> CheckpointError:
    """For a checkpoint whose files are called ``names``: none of them are weights that are read."""
    pickles = sorted(name for name in names if any(fnmatch(name, pattern) for pattern in _PICKLES))
    if pickles:
        return CheckpointError(
            f"{directory}: only pickled weights ({pickles[0]}), which can run code when read; convert them where you "
            "trust them: AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW_DIR) writes safetensors"
        )
    return CheckpointError(f"{directory}: no {SINGLE_NAME} and no {INDEX_NAME}; the checkpoint has no weights")


def file_names(directory: Path) -> list[str]:
    """Names of the files in a directory, in order."""
    return sorted(path.name for path in directory.iterdir() if path.is_file())


def require_layers(source: Path, config: PreTrainedConfig, weights: Weights) -> None:
    """Raise CheckpointError where there are more layers than tensors: building them could take hours."""
    layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    if isinstance(layers, int) and layers > len(weights.entries):
        raise CheckpointError(
            f"{source / 'config.json'}: num_hidden_layers {layers}, and the weight files hold {len(weights.entries)} "
            "tensors in all; the checkpoint does not fit its config.json"
        )


def check_file(path: Path) -> Weights:
    """The safetensors header promises how long the file is; hold it to that. Raises CheckpointError."""
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
            if length > LONGEST_HEADER:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(file.read(length))
            texts = header.pop("__metadata__", None) or {}
            metadata = {name: text for name, text in texts.items() if isinstance(text, str)}
            offsets = {name: [operator.index(end) for end in entry["data_offsets"]] for name, entry in header.items()}
            entries = {
                name: Entry(path, 8 + length + offsets[name][0], tuple(entry["shape"]), entry["dtype"])
                for name, entry in header.items()
            }
            expected = 8 + length + max((end for _, end in offsets.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            raise CheckpointError(f"{path}: not a safetensors file (unreadable header); download it again") from error
    if size != expected:
        raise CheckpointError(
            f"{path}: {size} bytes, its header says {expected}; it is truncated or altered: download it again"
        )
    return Weights(size, entries, metadata)
