"""Writing directories so that a half-written one never has its final name."""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specrun.engine_dir import CONFIG_NAME
from specrun.errors import OutputExistsError

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
            f"{output}: exists and has no config.json of ours; refusing to replace a directory that specbuild did not "
            "write: choose another --output_dir"
        )


def _ours(directory: Path) -> bool:
    try:
        data = json.loads((directory / CONFIG_NAME).read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(data, dict) and data.get("kind") in ("engine", "checkpoint")


@contextmanager
def new_directory(output: Path, force: bool) -> Iterator[Path]:
    """A temporary sibling of ``output`` that takes its name when the block succeeds and vanishes when it fails."""
    require_free(output, force)
    output = output.absolute()
    output.parent.mkdir(parents=True, exist_ok=True)
    # The name is known before the directory is there, so that Ctrl-C finds it to remove at any moment.
    scratch = output.parent / f".{output.name}.{secrets.token_hex(4)}.tmp"
    work, old = scratch / "new", scratch / "old"
    try:
        scratch.mkdir(mode=0o700)
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
        shutil.rmtree(scratch, ignore_errors=True)
