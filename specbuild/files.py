"""Room on disks, and files that several processes write."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from specbuild.progress import human_bytes


def require_space(needs: dict[Path, int]) -> None:
    """Raise OSError unless there is room for so many bytes in each of the directories, which need not exist yet."""
    disks: dict[int, tuple[Path, int]] = {}
    for directory, size in needs.items():
        there = existing(directory)
        disk = there.stat().st_dev
        disks[disk] = (there, size + disks.get(disk, (there, 0))[1])
    for there, size in disks.values():
        usage = shutil.disk_usage(there)
        if not usage.total or not os.access(there, os.W_OK):  # A file system like /proc has no room at all.
            raise OSError(errno.EACCES, "no directory can be made there; choose another place", str(there))
        if (free := usage.free) < size:
            reason = f"about {human_bytes(size)} are needed and {human_bytes(free)} are free: "
            raise OSError(errno.ENOSPC, reason + os.strerror(errno.ENOSPC), str(there))


def share_a_disk(one: Path, other: Path) -> bool:
    """Whether two directories, which need not exist yet, are on one file system."""
    return existing(one).stat().st_dev == existing(other).stat().st_dev


def existing(directory: Path) -> Path:
    """The directory, or the closest one above it that exists."""
    return next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())


@contextmanager
def locked(path: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """No other process is in the same block for ``path`` meanwhile; ``on_wait`` is called where one is. Leaves no file.

    A file that is removed while it is locked is safe: filelock compares what it has locked with what has the name.
    """
    lock = FileLock(f"{path}.lock")
    try:
        lock.acquire(blocking=False)
    except Timeout:
        on_wait()
        lock.acquire()
    try:
        yield
    finally:
        Path(lock.lock_file).unlink(missing_ok=True)
        lock.release()


def write_whole(path: Path, content: bytes | memoryview) -> None:
    """Write a file that is never seen half written. Only one process may do so at a time, see ``locked``."""
    temporary = path.with_name(f"{path.name}.part")
    temporary.write_bytes(content)
    temporary.replace(path)
