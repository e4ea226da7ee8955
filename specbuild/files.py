"""Room on disks, files that are never seen half written, and JSON of other tools."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

from specrun.command_line import human_bytes
from specrun.engine_dir.small_files import read_small
from specrun.errors import CheckpointError
from specrun.kv_cache.host_memory import free_memory


def require_space(needs: dict[Path, int]) -> None:
    """Raise OSError unless there is room for so many bytes in each of the directories, which need not exist yet."""
    disks: dict[int, tuple[Path, int]] = {}
    for directory, size in needs.items():
        there = _existing(directory)
        disk = there.stat().st_dev
        disks[disk] = (there, size + disks.get(disk, (there, 0))[1])
    for there, size in disks.values():
        usage = shutil.disk_usage(there)
        if not usage.total or not os.access(there, os.W_OK):  # A file system like /proc has no room at all.
            raise OSError(errno.EACCES, "no directory can be made there; choose another place", str(there))
        if (free := usage.free) < size:
            reason = f"about {human_bytes(size)} are needed and {human_bytes(free)} are free: "
            raise OSError(errno.ENOSPC, reason + os.strerror(errno.ENOSPC), str(there))


def _existing(directory: Path) -> Path:
    """The directory, or the closest one above it that exists."""
    return next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())


def free_bytes(directory: Path) -> int:
    """How much room a disk has for ``directory``, which need not exist yet."""
    return shutil.disk_usage(_existing(directory)).free


def say_free_memory() -> str:
    """How much memory is free, as the end of a sentence; empty where that is not known."""
    memory = free_memory()
    return "" if memory is None else f"; {human_bytes(memory)} are free"


def write_whole(path: Path, content: bytes | memoryview) -> None:
    """Write a file that is never seen half written. Only one process may do so at a time: see ``locked``."""
    temporary = path.with_name(f"{path.name}.part")
    temporary.write_bytes(content)
    temporary.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in ``path``. Raises CheckpointError."""
    try:
        data = json.loads(read_small(path))
    except (ValueError, OSError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable JSON ({error}); download it again") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {type(data).__name__}")
    return data
