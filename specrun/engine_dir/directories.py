"""Writing directories and files so that a half-written one never has its final name."""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock, Timeout, lock_descriptor

from specrun.engine_dir.config import CONFIG_NAME
from specrun.engine_dir.small_files import read_small
from specrun.errors import OutputExistsError

QUALITY_NAME = "quality.json"
"""Report of ``specbuild quantize``, in its output directory."""
TRAINING_NAME = "training.json"
"""Report of ``specbuild train_draft``, in its output directory."""
TRITON_KIND = "triton_repository"
"""The ``kind`` of a model repository for Triton."""
_SCRATCH_END = ".tmp"
_FULL = 1 << 20
"""A disk with less room than this is called full when writing to it fails."""


def require_free(output: Path, force: bool) -> None:
    """Raise OutputExistsError if ``output`` exists and may not be replaced; cheap, so that it is asked first."""
    for path in (output, *output.absolute().parents):
        if path.exists() and not path.is_dir():
            raise OutputExistsError(f"{path}: exists and is not a directory; choose another --output_dir")
    if output.exists() and any(output.iterdir()) and not force:
        raise OutputExistsError(f"{output}: exists; give --force to replace it, or choose another --output_dir")
    if output.exists() and any(output.iterdir()) and not _ours(output):
        # --force replaces what these tools wrote, not somebody's home directory or Hugging Face checkpoint.
        raise OutputExistsError(
            f"{output}: exists and has no config.json of ours; refusing to replace a directory that specbuild and "
            "specrun did not write: choose another --output_dir"
        )


def write_whole(file: Path, data: bytes, mode: int = 0o666) -> None:
    """Write a file that takes its place at once, or not at all. mode: less what the umask takes. Raises OSError."""
    temporary = file.with_name(f".{file.name}.{secrets.token_hex(4)}{_SCRATCH_END}")
    try:
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as written:
            written.write(data)
        os.replace(temporary, file)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _ours(directory: Path) -> bool:
    kinds = (
        (CONFIG_NAME, "kind", ("engine", "checkpoint", TRITON_KIND)),
        (QUALITY_NAME, "tool", ("specbuild quantize",)),
        (TRAINING_NAME, "tool", ("specbuild train_draft",)),
    )
    for name, key, values in kinds:
        try:
            data = json.loads(read_small(directory / name))
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(data, dict) and data.get(key) in values:
            return True
    return False


@contextmanager
def new_directory(output: Path, force: bool) -> Iterator[Path]:
    """A temporary sibling of ``output`` that takes its name when the block succeeds and vanishes when it fails.

    What killed builds of ``output`` have left is removed first.
    """
    require_free(output, force)
    output = output.absolute()
    output.parent.mkdir(parents=True, exist_ok=True)
    sweep(output)
    # The name is known before the directory is there, so that Ctrl-C finds it to remove at any moment.
    scratch = output.parent / f"{_scratch_prefix(output)}{secrets.token_hex(4)}{_SCRATCH_END}"
    work, old, lock = scratch / "new", scratch / "old", None
    try:
        scratch.mkdir(mode=0o700)
        lock = _lock(scratch)
        work.mkdir()
        yield work
        try:
            if output.exists():
                output.rename(old)
            work.rename(output)
        except BaseException:  # Ctrl-C between the two renames must not lose the old directory.
            if old.exists() and not output.exists():
                old.rename(output)
            raise
    except Exception as error:
        # Libraries report a full disk in words of their own, or in none.
        if shutil.disk_usage(output.parent).free < _FULL:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(output.parent)) from error
        if isinstance(error, OSError) and error.filename is None:
            raise OSError(error.errno, error.strerror or str(error), str(output)) from error
        raise
    finally:
        try:
            shutil.rmtree(scratch, ignore_errors=True)
        except BaseException:  # Ctrl-C in the middle of it.
            shutil.rmtree(scratch, ignore_errors=True)
            raise
        finally:
            if lock is not None:
                os.close(lock)


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


def _scratch_prefix(output: Path) -> str:
    """Of the names of ``output``'s temporary siblings: short enough for file systems that take 255 bytes."""
    return f".{os.fsdecode(os.fsencode(output.name)[:200])}."


def sweep(output: Path) -> None:
    """Remove the temporary siblings of ``output`` that no process works in: builds that were killed left them."""
    name = re.compile(re.escape(_scratch_prefix(output)) + "[0-9a-f]{8}" + re.escape(_SCRATCH_END))
    for scratch in output.parent.iterdir():
        if not name.fullmatch(scratch.name) or scratch.is_symlink():
            continue
        if (lock := _lock(scratch)) is None:
            continue
        if (scratch / "old").exists() and not output.exists():  # Killed between two renames.
            (scratch / "old").rename(output)
        shutil.rmtree(scratch, ignore_errors=True)
        os.close(lock)


def _lock(directory: Path) -> int | None:
    """A descriptor that shows other processes, until it is closed or this one dies, that the directory is in use.

    None where it is in use already, where it is gone or another user's, or where the file system has no locks.
    """
    try:
        descriptor = os.open(directory, os.O_RDONLY)
    except OSError:
        return None
    with suppress(OSError):
        if lock_descriptor(descriptor, blocking=False):
            return descriptor
    os.close(descriptor)
    return None
