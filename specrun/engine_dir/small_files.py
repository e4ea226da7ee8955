"""Files that describe something: JSON of a few kilobytes, from untrusted checkpoints."""

from __future__ import annotations

from pathlib import Path

MAX_BYTES = 64 << 20
"""The largest such file: the index of the largest checkpoint has a sixth of it."""


def read_small(path: Path) -> bytes:
    """A file's content. Raises ValueError where it is too large, and OSError, FileNotFoundError for what is no file."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    with path.open("rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise ValueError(f"larger than {MAX_BYTES} bytes")
    return data
