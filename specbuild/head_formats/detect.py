"""Which kind of head a directory holds, if it holds one."""

from __future__ import annotations

from collections.abc import Collection
from fnmatch import fnmatch
from pathlib import Path

from specbuild.files import read_json
from specbuild.head_formats.dflash import is_dflash, read_dflash
from specbuild.head_formats.eagle import MARKS, Head, architectures, read_eagle
from specbuild.head_formats.medusa import is_medusa, read_medusa
from specbuild.head_formats.mtp import is_mtp, read_mtp
from specbuild.weights.safetensors_files import file_names
from specrun.engine_dir.config import CONFIG_NAME
from specrun.errors import CheckpointError


def read_head(directory: Path, allow_pickle: bool = False) -> Head:
    """Read a head's configuration and its weight files' headers. Raises CheckpointError, UnsupportedModelError.

    allow_pickle: weights may be pickled, where there are none as safetensors.
    """
    path = directory / CONFIG_NAME
    if not path.is_file():
        raise CheckpointError(f"{directory}: no {CONFIG_NAME}; expected the directory of a draft head")
    data = read_json(path)
    kinds = ((is_medusa, read_medusa), (is_dflash, read_dflash), (is_mtp, read_mtp))
    read = next((read for is_kind, read in kinds if is_kind(data)), read_eagle)
    return read(directory, data, allow_pickle)


def refuse_head(directory: Path, names: Collection[str] | None = None) -> None:
    """Raise CheckpointError where ``directory`` holds a head, and a whole model is expected. See ``holds_head``."""
    if holds_head(directory, names):
        raise CheckpointError(f"{directory}: holds a draft head, not a whole model; give its target with --head_of")


def holds_head(directory: Path, names: Collection[str] | None = None) -> bool:
    """Whether ``directory`` holds a head that is a checkpoint of its own.

    names: of its files, where some of them have not been downloaded yet. Raises CheckpointError.
    """
    names = file_names(directory) if names is None else names
    path = directory / CONFIG_NAME
    config = read_json(path) if path.is_file() else {}
    is_eagle = any(mark in config for mark in MARKS) or any("Eagle" in str(name) for name in architectures(config))
    is_alone = not any(fnmatch(name, "model*.safetensors") for name in names)
    return is_eagle or is_dflash(config) or (is_medusa(config) and is_alone)


def holds_own_head(directory: Path) -> bool:
    """Whether ``directory`` holds a whole model that says it has MTP layers or Medusa heads. Raises CheckpointError."""
    path = directory / CONFIG_NAME
    config = read_json(path) if path.is_file() else {}
    return is_mtp(config) or is_medusa(config)
