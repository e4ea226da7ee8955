"""Memory of the machine itself: what is free, and errors that say what would not fit."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from pathlib import Path

from specrun.devices.control_group import memory_left
from specrun.errors import BackendError

_SPARED = 0.05
"""Share of the free memory that is left to others."""
_MEMINFO = Path("/proc/meminfo")


def free_memory() -> int | None:
    """Bytes that this process may still take, by the machine's free memory and the limit of its control group.

    None if the operating system does not report it.
    """
    try:
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        free = int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError):
        return None
    left = memory_left()
    return free if left is None else min(free, left)


def return_freed() -> None:
    """Return memory that this process has freed to the machine. glibc keeps it otherwise; others have no such call."""
    with suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def shortage(what: str, size: int, advice: str) -> BackendError | None:
    """Why ``size`` bytes for ``what`` cannot be had; None where they can, or where nothing is known of it."""
    free = free_memory()
    if free is None or size <= free * (1 - _SPARED):
        return None
    return BackendError(f"not enough memory: {what}: {size / 1e9:.2f} GB, and {free / 1e9:.2f} GB are free; {advice}")
