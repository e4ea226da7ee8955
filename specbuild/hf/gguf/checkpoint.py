"""A GGUF file as the directory of a Hugging Face checkpoint, kept in the user's cache. Nothing heavy is imported."""

from __future__ import annotations

import hashlib
from pathlib import Path

from specbuild import __version__
from specbuild.weights.gguf_file import read_gguf
from specbuild.weights.safetensors_files import GGUF_NAME
from specrun.engine_dir.directories import locked, new_directory
from specrun.engine_dir.user_cache import gguf_checkpoints, note_use, require_own
from specrun.errors import UnsupportedModelError


def gguf_directory(path: Path) -> Path:
    """The checkpoint's directory, which is made where the cache has none of this file.

    Raises CheckpointError, UnsupportedModelError.
    """
    path = path.resolve()
    state = path.stat()
    key = hashlib.sha256(repr((str(path), state.st_size, state.st_mtime_ns, __version__)).encode()).hexdigest()
    directory = gguf_checkpoints() / f"{path.stem}-{key[:16]}"
    require_own(directory)
    if directory.is_dir():
        note_use(directory)
        return directory
    from specbuild.hf.gguf.write import write_checkpoint

    file = read_gguf(path)
    if file.metadata.get("split.count", 1) != 1:
        raise UnsupportedModelError(
            f"{path}: is one of {file.metadata['split.count']} parts; join them first: "
            f"llama-gguf-split --merge {path} NEW.gguf"
        )
    directory.parent.mkdir(parents=True, exist_ok=True)
    with locked(directory):
        if not directory.is_dir():
            with new_directory(directory, force=False) as work:
                write_checkpoint(file, work)
    return directory


def origin_of(directory: Path) -> Path:
    """What a checkpoint's directory was made of, for people: a GGUF file, or itself."""
    link = directory / GGUF_NAME
    is_made = link.is_symlink() and directory.resolve().parent == gguf_checkpoints().resolve()
    return link.readlink() if is_made else directory
