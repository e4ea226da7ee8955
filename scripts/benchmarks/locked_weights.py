"""Weights that stay in memory while they are measured."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

_LARGE_FILE = 1 << 20
"""Bytes of a file that may have weights."""


def lock_weights(directories: Sequence[Path]) -> list[np.memmap[Any, Any]]:
    """Keep the large files of ``directories`` in memory as long as the result lives.

    Some systems take pages of files away that nobody has read for a minute, and a turn of all others takes longer. That
    costs those whose weights are mapped, as ours are, and not those that copy them.
    """
    locked = []
    files = sorted(file for directory in directories for file in (directory, *directory.glob("**/*")))
    for file in files:
        if file.is_file() and file.stat().st_size >= _LARGE_FILE:
            pages = np.memmap(file, np.uint8, "r")
            if ctypes.CDLL(None).mlock(ctypes.c_void_p(pages.ctypes.data), ctypes.c_size_t(pages.nbytes)):
                raise click.ClickException(f"{file} cannot be locked in memory: raise the limit (ulimit -l)")
            locked.append(pages)
    return locked
