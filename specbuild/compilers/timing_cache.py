"""TensorRT's timing cache: how fast its kernels were on a GPU, kept from build to build in a file.

A build that finds its layers in the cache does not time them again, and chooses the same kernels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specbuild.files import locked, write_whole
from specrun.errors import BuildError


def load_timings(config: Any, file: Path, log: Any) -> Any:
    """Let a builder's configuration have the timings in ``file``, or none where there is no file yet.

    log: the builder's. Returns the cache, which must outlive the build. Raises BuildError where it is not taken.
    """
    cache = _parse(config, file, log)
    if not config.set_timing_cache(cache, False):
        raise _not_taken(file, log)
    return cache


def save_timings(config: Any, cache: Any, file: Path, log: Any) -> None:
    """Write the timings to ``file``, beside those that other builds have put there meanwhile."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with locked(file):
        if not cache.combine(_parse(config, file, log), False):
            raise _not_taken(file, log)
        write_whole(file, memoryview(cache.serialize()))


def _parse(config: Any, file: Path, log: Any) -> Any:
    """TensorRT takes an empty cache for one that it cannot read, and warns: to write that would lose the file."""
    before = len(log.problems)
    cache = config.create_timing_cache(file.read_bytes() if file.is_file() else b"")
    if cache is None or len(log.problems) > before:
        raise _not_taken(file, log)
    return cache


def _not_taken(file: Path, log: Any) -> BuildError:
    reason = log.problems[-1] if log.problems else "no reason given"
    return BuildError(
        f"--timing_cache {file}: TensorRT does not take it ({reason}): it is of another version or GPU, or no timing "
        "cache; give another file"
    )
