"""The test suite."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

_CORES = os.sched_getaffinity(0)

if worker := os.environ.get("PYTEST_XDIST_WORKER", os.environ.get("SPECBUILD_TEST_WORKER")):
    # Each process keeps to a core, before torch counts them: threads that wait would spin on the others' cores.
    os.sched_setaffinity(0, {sorted(_CORES)[int(worker.removeprefix("gw")) % len(_CORES)]})


@contextmanager
def all_cores() -> Iterator[None]:
    """Programs that are started inside may use every core that the suite may use."""
    own = os.sched_getaffinity(0)
    os.sched_setaffinity(0, _CORES)
    try:
        yield
    finally:
        os.sched_setaffinity(0, own)
