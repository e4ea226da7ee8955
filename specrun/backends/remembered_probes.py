"""What probing an engine on this processor found, kept in the user's cache, so that it is probed here once."""

from __future__ import annotations

import json
from pathlib import Path

from specrun.engine_dir import checksums
from specrun.engine_dir.bit_exact import ShapeClass
from specrun.engine_dir.config import EngineConfig
from specrun.engine_dir.directories import write_whole
from specrun.engine_dir.user_cache import user_cache

_MOST = 1000
"""Engines that are remembered; the oldest are forgotten first."""


def key_of(config: EngineConfig, shapes: ShapeClass, processor: str) -> str:
    """A name for an engine's content, what it is padded to, and the processor and runtime."""
    files = {name: info.sha256 for name, info in config.files.items()}
    return checksums.key_of([files, shapes.model_dump(), processor])


def recall(key: str) -> bool | None:
    """What was remembered under ``key``; None where nothing was."""
    return _read().get(key)


def remember(key: str, holds: bool) -> None:
    """Keep what was found; nowhere where the cache cannot be written."""
    try:
        place = _place()
        place.parent.mkdir(parents=True, exist_ok=True)
        known = dict([*_read().items(), (key, holds)][-_MOST:])
        write_whole(place, json.dumps(known).encode())
    except (OSError, RuntimeError):
        return


def _place() -> Path:
    return user_cache() / "probes.json"


def _read() -> dict[str, bool]:
    """What cannot be read counts as nothing."""
    try:
        found = json.loads(_place().read_bytes())
    except (OSError, ValueError, RecursionError, RuntimeError):  # RuntimeError: there is no home.
        return {}
    return {key: value for key, value in found.items() if isinstance(value, bool)} if isinstance(found, dict) else {}
