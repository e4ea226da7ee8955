"""Symbolic links in an untrusted checkpoint: none of them leads to other files of this machine."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

from specrun.engine_dir.user_cache import gguf_checkpoints
from specrun.errors import SpecError


def require_own_files(checkpoint: Path, error: type[SpecError]) -> Path:
    """``checkpoint``. Raises ``error`` for a symbolic link that leaves it, there or in a folder of it.

    A snapshot in the Hub's cache consists of links to that repository's own blobs, and what we make of a GGUF file has
    a link to that file. ``checkpoint`` itself may be a link.
    """
    root = checkpoint.resolve()
    if root.parent == gguf_checkpoints().resolve():
        return checkpoint
    inside = [root]
    if root.parent.name == "snapshots":
        inside.append(root.parent.parent / "blobs")
    for path in chain(checkpoint.glob("*"), checkpoint.glob("*/*")):
        if not path.is_symlink():
            continue
        try:
            target = path.resolve()
        except (OSError, RuntimeError) as cause:  # A circle.
            raise error(f"{path}: a symbolic link that leads nowhere ({cause}); remove it") from cause
        if not any(target.is_relative_to(folder) for folder in inside):
            raise error(
                f"{path}: a symbolic link that leaves the checkpoint (to {target}), which is not followed; if it is "
                "yours, put a copy or a hard link of that file in its place"
            )
    return checkpoint
