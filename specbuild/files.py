"""Room on disks."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

from specbuild.progress import human_bytes


def require_space(needs: dict[Path, int]) -> None:
    """Raise OSError unless there is room for so many bytes in each of the directories, which need not exist yet."""
    disks: dict[int, tuple[Path, int]] = {}
    for directory, size in needs.items():
        there = existing(directory)
        disk = there.stat().st_dev
        disks[disk] = (there, size + disks.get(disk, (there, 0))[1])
    for there, size in disks.values():
        if (free := shutil.disk_usage(there).free) < size:
            reason = f"about {human_bytes(size)} are needed and {human_bytes(free)} are free: "
            raise OSError(errno.ENOSPC, reason + os.strerror(errno.ENOSPC), str(there))


def share_a_disk(one: Path, other: Path) -> bool:
    """Whether two directories, which need not exist yet, are on one file system."""
    return existing(one).stat().st_dev == existing(other).stat().st_dev


def existing(directory: Path) -> Path:
    """The directory, or the closest one above it that exists."""
    return next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
