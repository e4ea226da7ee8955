"""Engines that were built before, kept by what they were made of: ``specbuild engine --cache_dir``.

An entry is an engine directory under a name that is computed from its provenance. It is checked whole before it is
used, and one that was altered is built again. Output directories get hard links to its files where the file system
has them. Nothing is ever removed: any entry may be deleted when no build runs.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from specbuild.artifacts.provenance import key, made_before, what_differs
from specrun.engine_dir.config import CONFIG_NAME, EngineConfig, Provenance
from specrun.engine_dir.directories import locked, new_directory

_NO_LINKS = {errno.EXDEV, errno.EPERM, errno.EACCES, errno.EMLINK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS}
"""Other file systems, those without hard links, and files of other users."""


def place_of(cache: Path, made: Provenance) -> Path:
    """Where the cache has an engine, or would have it."""
    return cache / key(made)


def look_up(cache: Path, made: Provenance) -> EngineConfig | None:
    """What describes the cache's engine; None where it has none, or none that is whole."""
    place = place_of(cache, made)
    found = made_before(place, EngineConfig)
    return None if found is None or what_differs(place, found, made) else found


def take(
    cache: Path, made: Provenance, build: Callable[[Path], EngineConfig], output: Path, force: bool
) -> tuple[EngineConfig, bool]:
    """Put the cache's engine into ``output``. ``build`` makes it where the cache has none; others that want it wait.

    The second value: it was in the cache already.
    """
    place = place_of(cache, made)
    cache.mkdir(parents=True, exist_ok=True)
    with locked(place):
        found = look_up(cache, made)
        config = found
        if config is None:
            shutil.rmtree(place, ignore_errors=True)  # What was altered.
            config = build(place)
        # From another directory it may have been built, with the same content.
        source = config.provenance.model_copy(update={"source": made.source})
        config = config.model_copy(update={"provenance": source})
        with new_directory(output, force) as work:
            for name in config.files:
                _link(place / name, work / name)
            (work / CONFIG_NAME).write_text(config.model_dump_json(indent=2) + "\n")
    return config, found is not None


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(exist_ok=True)
    try:
        os.link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        shutil.copy2(source, target)  # With its time stamp, by which it is known to be unchanged.
