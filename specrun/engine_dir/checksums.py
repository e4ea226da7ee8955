"""Checksums of files, and the one rule by which a file is known to be unchanged without reading it.

Beside a checksum stands the state that the file had: as many numbers of ``state_of`` as stay the same while the file
does. Of a file that stays where it is those are all; of one that is copied and linked they are the first two.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path


def checksum_of(path: Path) -> str:
    """The sha256 of a file's content."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def key_of(parts: object) -> str:
    """32 hexadecimal digits of something in JSON's types: a name for what is made of it."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]


def state_of(path: Path) -> list[int]:
    """Size, time of change, time of change of the entry, inode and device.

    The second time cannot be set: it tells of a file that was put in another one's place with the old times.
    """
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev]


def is_unchanged(path: Path, noted: Sequence[int]) -> bool:
    """Whether the file is in the state that was recorded with its checksum; False if none was recorded."""
    return bool(noted) and state_of(path)[: len(noted)] == [*noted]
