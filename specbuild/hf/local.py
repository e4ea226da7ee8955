"""Checkpoints in directories of this machine, and what else a name of a checkpoint may be."""

from __future__ import annotations

from pathlib import Path

from specbuild.hf.unsupported import refuse_other_formats
from specrun.engine_dir.links import require_own_files
from specrun.errors import CheckpointError


def local_directory(model: str, option: str) -> Path | None:
    """``model`` as a directory; None where it is a Hub id (owner/name). Raises CheckpointError where it is neither."""
    path = Path(model).expanduser()
    if path.is_dir():
        return require_own_files(path, CheckpointError)
    if path.suffix == ".gguf" and path.is_file():
        refuse_other_formats(path.parent, [path.name])
    if path.exists():
        raise CheckpointError(f"{model}: is a file; {option} wants the directory that holds config.json")
    if not _is_hub_id(model):
        raise CheckpointError(
            f"{model}: no such directory; {option} wants a checkpoint directory or a Hub ID (owner/name)"
        )
    if path.parent.is_dir():
        raise CheckpointError(
            f"{model}: no such directory, though {path.parent} is one here, so it is not taken for a Hub ID; for that, "
            "work in another directory"
        )
    return None


def _is_hub_id(model: str) -> bool:
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(model)
    except HFValidationError:
        return False
    return "/" in model
