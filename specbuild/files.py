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
        there = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
        disk = there.stat().st_dev
        disks[disk] = (there, size + disks.get(disk, (there, 0))[1])
    for there, size in disks.values():
        if (free := shutil.disk_usage(there).free) < size:
            reason = f"about {human_bytes(size)} are needed and {human_bytes(free)} are free: "
            raise OSError(errno.ENOSPC, reason + os.strerror(errno.ENOSPC), str(there))
