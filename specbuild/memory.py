"""Resident memory of mapped weight files: pages that were read are given back while the work goes on.

Weights are mapped, read once from end to end, and read again seconds later; without this a process ends up with a
whole checkpoint resident. Given-back pages stay in the page cache, so reading one again costs a fault, not a disk.
"""

from __future__ import annotations

import ctypes
import mmap
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

Range = tuple[int, int]
"""First address and the one after the last."""

_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \S+ *(.*)")
_SECONDS = 0.02  # Between two turns; at some GB/s, tens of megabytes are read meanwhile.


@contextmanager
def not_resident(ranges: list[Range]) -> Iterator[None]:
    """While the block runs, keep ``ranges`` from filling memory.

    They must be mapped from files, stay mapped throughout, and nobody may write to them: written pages are lost.
    On systems other than Linux nothing happens.
    """
    if not ranges or sys.platform != "linux":
        yield
        return
    libc = ctypes.CDLL(None)
    done = threading.Event()

    def work() -> None:
        while not done.wait(_SECONDS):
            for start, end in ranges:
                first = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE
                libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(max(0, end - first)), mmap.MADV_DONTNEED)

    thread = threading.Thread(target=work, name="not_resident", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def mapped_weights(model: nn.Module, directory: Path) -> list[Range]:
    """Where the parameters of ``model`` lie that are mapped from ``directory``; they stay there while it lives."""
    mappings = clean_mappings(directory)
    parameters = [(parameter.data_ptr(), parameter.data_ptr() + parameter.nbytes) for parameter in model.parameters()]
    return [(a, b) for a, b in parameters if any(start <= a and b <= end for start, end in mappings)]


def clean_mappings(directory: Path) -> list[Range]:
    """What this process maps from the files in ``directory``, as far as nobody has written to it."""
    if sys.platform != "linux":
        return []
    # The Hub's cache keeps symbolic links to files elsewhere; the kernel names those.
    files = {str(path.resolve()) for path in directory.iterdir()}
    found: list[Range] = []
    current: Range | None = None
    for line in Path("/proc/self/smaps").read_text(errors="replace").splitlines():
        if mapping := _MAPPING.fullmatch(line):
            current = (int(mapping[1], 16), int(mapping[2], 16)) if mapping[3] in files else None
        elif current and line.split() == ["Anonymous:", "0", "kB"]:  # Written pages are anonymous: no file has them.
            found.append(current)
    return found
