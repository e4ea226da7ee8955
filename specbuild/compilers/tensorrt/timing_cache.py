"""TensorRT's timing cache: a file with the times of its kernels on a GPU, for later builds.

A build does not time layers again that are in the cache, and chooses the same kernels.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbuild.files import write_whole
from specrun.engine_dir.directories import locked
from specrun.errors import BuildError

if TYPE_CHECKING:
    from tensorrt import IBuilderConfig, ITimingCache


def load_timings(config: IBuilderConfig, file: Path, log: Any) -> ITimingCache:
    """Set the timings in ``file`` in a builder's configuration; none if there is no file yet.

    log: the builder's. Returns the cache, which must outlive the build. Raises BuildError where TensorRT refuses it.
    """
    cache = _parse(config, file.read_bytes() if file.is_file() else b"", log)
    if cache is None or not config.set_timing_cache(cache, False):
        reason = log.problems[-1] if log.problems else "no reason given"
        raise BuildError(
            f"--timing_cache {file}: TensorRT does not take it ({reason}): it is of another version or GPU, or no "
            "timing cache; give another file"
        )
    return cache


def save_timings(config: IBuilderConfig, cache: ITimingCache, file: Path, log: Any) -> None:
    """Write the timings to ``file``, merged with those that other builds have written meanwhile.

    A file that TensorRT does not take any more is kept, with a warning in the log, because the plan must not be lost.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    with locked(file):
        if file.is_file():
            stored = _parse(config, file.read_bytes(), log)
            if stored is None or not cache.combine(stored, False):
                log.warnings.append(f"--timing_cache {file}: not written, TensorRT does not take what is there now")
                return
        write_whole(file, memoryview(cache.serialize()))


def _parse(config: IBuilderConfig, content: bytes, log: Any) -> ITimingCache | None:
    """A cache; None where TensorRT cannot read ``content``, and returns an empty cache with a warning."""
    before = len(log.problems)
    cache = config.create_timing_cache(content)
    return cache if len(log.problems) == before else None
