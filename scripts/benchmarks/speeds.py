"""Times of short work, and the speed of a copy."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from specrun.devices.processor import num_threads

_COPIED = 1 << 29
"""Bytes that all cores copy together: more than their caches hold."""


def copy_speed() -> float:
    """Bytes a second that all cores read and write together."""
    cores = num_threads()
    size = _COPIED // cores
    parts = [(np.ones(size, np.uint8), np.empty(size, np.uint8)) for _ in range(cores)]
    with ThreadPoolExecutor(cores) as pool:
        seconds = fastest(lambda: list(pool.map(lambda part: np.copyto(part[1], part[0]), parts)), 5)
    return 2 * size * cores / seconds


def fastest(run: Callable[[], object], passes: int) -> float:
    """Seconds that the fastest of a few passes takes."""
    times = []
    for _ in range(passes):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)
