"""Checksums of what ``convert`` reads. A file that has not changed since its checksum was noted is not read again."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from specbuild.weights.safetensors_files import GGUF_INDEX_NAME, GGUF_NAME, INDEX_NAME, SINGLE_NAME
from specrun.engine_dir.checksums import checksum_of, is_unchanged, state_of

if TYPE_CHECKING:
    from specrun.engine_dir.config import Provenance

_SMALL = ("*.json", "tokenizer*", "*.model", "*.jinja", "*.py")
_WEIGHTS = ("*.safetensors", "*.bin", "*.pt")


class Inputs(NamedTuple):
    """Fields of ``Provenance``."""

    inputs: dict[str, str]
    input_states: dict[str, list[int]]


def describe_inputs(sources: Mapping[str, Path], known: Provenance | Inputs | None = None) -> Inputs:
    """Checksums of all files of ``sources``, which are directories and files by name.

    known: where checksums were noted down before.
    """
    inputs = Inputs({}, {})
    for source, path in sources.items():
        for file in _files(path) if path.is_dir() else [path]:
            name = f"{source}/{file.name}" if path.is_dir() else source
            inputs.input_states[name] = state_of(file)
            if known and name in known.inputs and is_unchanged(file, known.input_states.get(name, [])):
                inputs.inputs[name] = known.inputs[name]
            else:
                inputs.inputs[name] = checksum_of(file)
    return inputs


def _files(directory: Path) -> list[Path]:
    """What a checkpoint's conversion may read, in the order of the names."""
    small = {path for pattern in _SMALL for path in directory.glob(pattern)}
    return sorted(path for path in {*small, *_weights(directory)} if path.is_file())


def _weights(directory: Path) -> Iterator[Path]:
    """The weights of a checkpoint. Beside them some have the same ones in another form, which are not read."""
    if (index := directory / INDEX_NAME).is_file():
        try:
            names = set(json.loads(index.read_bytes())["weight_map"].values())
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return  # Reading the checkpoint raises the error.
        yield from (directory / name for name in names if isinstance(name, str) and Path(name).name == name)
    elif (single := directory / SINGLE_NAME).is_file():
        yield single
        if (directory / GGUF_INDEX_NAME).is_file():
            yield directory / GGUF_NAME
    else:
        yield from (path for pattern in _WEIGHTS for path in directory.glob(pattern))
