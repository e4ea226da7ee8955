"""What was measured of engines on this machine, kept in the user's cache: each thing is measured here once."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeVar

from pydantic import JsonValue

from specrun import cpu_operators
from specrun.devices.processor import describe_processor
from specrun.engine_dir import checksums
from specrun.engine_dir.config import EngineConfig
from specrun.engine_dir.directories import write_whole
from specrun.engine_dir.small_files import read_small
from specrun.engine_dir.user_cache import user_cache

_MOST = 1000
"""Measurements that are kept; the oldest are forgotten first."""

Found = TypeVar("Found")


def describe_runtime(config: EngineConfig) -> str:
    """The processor, and what runs the engine on it. What was measured under another one may not hold."""
    from specrun.backends.ort_session import import_ort

    runtime = f"{describe_processor()}, onnxruntime {import_ort().__version__}"
    if config.backend.needs_cpu_operators and (library := cpu_operators.library()):
        runtime += f", operators {_digest(library)}"
    return runtime


@cache
def _digest(library: Path) -> str:
    """Names what the compiled operators compute and how fast they are: either may change with any compilation."""
    return checksums.checksum_of(library)[:12]


def known_here(
    config: EngineConfig, what: JsonValue, measure: Callable[[], JsonValue], read: Callable[[JsonValue], Found]
) -> tuple[Found, bool]:
    """What ``measure`` found for the engine of ``config`` on this machine, and whether it was measured just now.

    what: distinguishes the measurements of an engine. read: makes of what is kept what is wanted. It raises ValueError
    where that is damaged; then it is measured again. Nothing is kept where the cache cannot be written.
    """
    files = {name: info.sha256 for name, info in config.files.items()}
    key = checksums.key_of([files, what, describe_runtime(config)])
    kept = _read()
    if key in kept:
        try:
            return read(kept[key]), False
        except ValueError:
            pass
    value = measure()
    _keep(key, value)
    return read(value), True


def _keep(key: str, value: JsonValue) -> None:
    try:
        path = _file()
        path.parent.mkdir(parents=True, exist_ok=True)
        known = dict([*_read().items(), (key, value)][-_MOST:])
        write_whole(path, json.dumps(known).encode())
    except (OSError, RuntimeError):
        return


def _file() -> Path:
    return user_cache() / "probes.json"


def _read() -> dict[str, JsonValue]:
    """What cannot be read counts as nothing."""
    try:
        known = json.loads(read_small(_file()))
    except (OSError, ValueError, RecursionError, RuntimeError):  # RuntimeError: there is no home.
        return {}
    return known if isinstance(known, dict) else {}
