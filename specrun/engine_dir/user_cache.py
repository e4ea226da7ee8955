"""The user's cache: engines that were built of checkpoints, and checkpoints that were made of GGUF files."""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from specrun.engine_dir.directories import locked
from specrun.errors import EngineDirError, OutputExistsError


@dataclass(frozen=True)
class Entry:
    """An engine, or a checkpoint of a GGUF file, in the cache."""

    name: str
    """The checkpoint's name and a key of 16 hexadecimal digits."""
    path: Path
    bytes: int
    """Size on the disk in bytes."""
    used: float
    """Time of the last use, in seconds since 1970."""


def user_cache() -> Path:
    """Our folder in the user's cache, by the XDG base directory specification."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specrun"


def cached_engines() -> Path:
    """The folder of the engines that were built of checkpoints."""
    return user_cache() / "engines"


def gguf_checkpoints() -> Path:
    """The folder of what GGUF files are as checkpoints."""
    return user_cache() / "gguf"


def require_own(directory: Path) -> None:
    """Raise EngineDirError for an entry that another user could have made: one of theirs, or a link elsewhere."""
    with suppress(FileNotFoundError):
        if directory.is_symlink() or directory.lstat().st_uid != os.geteuid():
            what = "is a link elsewhere" if directory.is_symlink() else "belongs to another user"
            raise EngineDirError(
                f"{directory}: {what}, and a cached engine must be your own; remove it, or name another cache with "
                "XDG_CACHE_HOME"
            )


def note_use(directory: Path) -> None:
    """Note that an entry is used now. A cache that cannot be written is left as it is."""
    with suppress(OSError):
        os.utime(directory)


def entries() -> list[Entry]:
    """What is in the cache; what was used last comes first."""
    folders = [folder for folder in (cached_engines(), gguf_checkpoints()) if folder.is_dir()]
    places = [path for folder in folders for path in folder.iterdir() if path.is_dir()]
    cached = [
        Entry(path.name, path, _bytes_of(path), path.stat().st_mtime)
        for path in places
        if not path.name.startswith(".")
    ]
    return sorted(cached, key=lambda entry: -entry.used)


def remove(entry: Entry) -> None:
    """Remove an entry. Raises OutputExistsError while another process builds it, and OSError."""

    def refuse() -> None:
        raise OutputExistsError(f"{entry.name}: another process is building it; wait for that, and remove it then")

    with locked(entry.path, refuse):
        remove_locked(entry.path)


def remove_locked(directory: Path) -> None:
    """Remove the entry, which this process has locked. Raises OSError."""
    # Under another name first: what is half removed must not be found as an engine.
    gone = directory.with_name(f".{directory.name}.removed")
    shutil.rmtree(gone, ignore_errors=True)  # What a removal that was killed has left.
    directory.rename(gone)
    shutil.rmtree(gone)


def to_prune(cached: list[Entry], max_bytes: int | None, older_than: float | None) -> list[Entry]:
    """The entries to remove, so that the others take ``max_bytes`` at most and were used in ``older_than`` seconds.

    cached: in the order of ``entries``. None: no such limit.
    """
    oldest = 0.0 if older_than is None else time.time() - older_than
    kept, pruned = 0, []
    for entry in cached:
        too_large = max_bytes is not None and kept + entry.bytes > max_bytes
        if too_large or entry.used < oldest:
            pruned.append(entry)
        else:
            kept += entry.bytes
    return pruned


def _bytes_of(directory: Path) -> int:
    files = (path for path in directory.rglob("*") if path.is_file() and not path.is_symlink())
    return sum(path.stat().st_size for path in files)
