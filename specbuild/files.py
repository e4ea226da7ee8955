"""Writing directories so that a half-written one never has its final name."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from specrun.errors import OutputExistsError


def require_free(output: Path, force: bool) -> None:
    """Raise OutputExistsError if ``output`` exists and may not be replaced; cheap, so that it is asked first."""
    if output.exists() and not output.is_dir():
        raise OutputExistsError(f"{output}: exists and is not a directory; choose another --output_dir")
    if output.exists() and any(output.iterdir()) and not force:
        raise OutputExistsError(f"{output}: exists; give --force to replace it, or choose another --output_dir")
    if force and output.exists() and any(output.iterdir()) and not (output / "config.json").is_file():
        # --force replaces what these tools wrote, not somebody's home directory.
        raise OutputExistsError(
            f"{output}: exists and has no config.json; refusing to replace a directory that is not ours"
        )


@contextmanager
def new_directory(output: Path, force: bool) -> Iterator[Path]:
    """A temporary sibling of ``output`` that takes its name when the block succeeds and vanishes when it fails."""
    require_free(output, force)
    output = output.absolute()
    output.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=f".{output.name}.", suffix=".tmp", dir=output.parent))
    work, old = scratch / "new", scratch / "old"
    try:
        work.mkdir()
        yield work
        if output.exists():
            output.rename(old)
        try:
            work.rename(output)
        except OSError:
            if old.exists():
                old.rename(output)
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
