"""Checkpoints in directories of this machine, and what else a name of a checkpoint may be."""

from __future__ import annotations

from pathlib import Path

from specbuild.hf.gguf.checkpoint import gguf_directory
from specrun.engine_dir.links import require_own_files
from specrun.errors import CheckpointError

GGUF = ".gguf"


def local_directory(model: str, option: str) -> Path | None:
    """``model`` as a directory; None where it is a Hub ID (owner/name), perhaps with a GGUF file behind it.

    Of a GGUF file it is one in the user's cache. Raises CheckpointError where it is neither.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        file = only_gguf(path)
        return gguf_directory(file) if file else require_own_files(path, CheckpointError)
    if path.suffix == GGUF and path.is_file():
        return gguf_directory(path)
    if path.exists():
        raise CheckpointError(f"{model}: is a file; {option} wants the directory that holds config.json")
    if hub_file(model):
        return None
    if not _is_hub_id(model):
        raise CheckpointError(
            f"{model}: no such directory; {option} wants a checkpoint directory, a GGUF file or a Hub ID (owner/name)"
        )
    if path.parent.is_dir():
        raise CheckpointError(
            f"{model}: no such directory, though {path.parent} is one here, so it is not taken for a Hub ID; for that, "
            "work in another directory"
        )
    return None


def hub_file(model: str) -> tuple[str, str] | None:
    """Hub ID and file of ``owner/name/file.gguf``; None where it is something else."""
    owner, _, rest = model.partition("/")
    name, _, file = rest.partition("/")
    return (f"{owner}/{name}", file) if file.endswith(GGUF) and _is_hub_id(f"{owner}/{name}") else None


def only_gguf(directory: Path) -> Path | None:
    """The GGUF file of a directory without safetensors. Raises CheckpointError where there are several."""
    if any(path.suffix == ".safetensors" for path in directory.iterdir()):
        return None
    files = sorted(path for path in directory.iterdir() if path.suffix == GGUF and path.is_file())
    if len(files) > 1:
        raise CheckpointError(f"{directory}: holds {len(files)} GGUF files; give one of them, such as {files[0]}")
    return files[0] if files else None


def _is_hub_id(model: str) -> bool:
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(model)
    except HFValidationError:
        return False
    return "/" in model
