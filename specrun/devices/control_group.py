"""Limits of the control groups that this process is in, those of a container say (man 7 cgroups; versions 1 and 2)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

_ROOT, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def cpu_limit() -> float | None:
    """Processors' worth of time that the groups allow; None where they set no quota."""
    processors = []
    for folder in _folders("cpu", _ROOT, _OWN):
        text = _read(folder / "cpu.max") or [_word(folder / "cpu.cfs_quota_us"), _word(folder / "cpu.cfs_period_us")]
        if len(text) == 2 and all(word.isdecimal() for word in text) and int(text[1]):  # "max" and -1: no quota.
            processors.append(int(text[0]) / int(text[1]))
    return min(processors, default=None)


def memory_left() -> int | None:
    """Bytes that the groups still allow; None where they set no limit."""
    sizes = []
    for limit, used in _memory_files(_ROOT, _OWN):
        words = _word(limit), _word(used)
        if all(word.isdecimal() for word in words):
            sizes.append(max(0, int(words[0]) - int(words[1])))
    return min(sizes, default=None)


@cache
def _memory_files(root: Path, group: Path) -> list[tuple[Path, Path]]:
    """Limit and use of each group. A process stays where it is, so they are looked for once."""
    names = (("max", "current"), ("limit_in_bytes", "usage_in_bytes"))
    pairs = [
        (folder / f"memory.{limit}", folder / f"memory.{used}")
        for folder in _folders("memory", root, group)
        for limit, used in names
    ]
    return [(limit, used) for limit, used in pairs if used.is_file()]


def _folders(controller: str, top: Path, own_groups: Path) -> Iterator[Path]:
    """Where the files of the process's groups are, and of those around them. A container may see its own as the root.

    controller: by which version 1 has groups of their own. top: of all groups. own_groups: the file that lists ours.
    """
    for line in _lines(own_groups):
        number, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if number == "0" and not names:
            root = top
        elif controller in names.split(","):
            root = top / names if (top / names).is_dir() else top / controller
        else:
            continue
        group = Path(path.lstrip("/"))
        yield from (
            root / part for part in (group, *group.parents) if ".." not in part.parts and (root / part).is_dir()
        )


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except (OSError, ValueError):  # No such group.
        return []


def _read(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


def _word(path: Path) -> str:
    return next(iter(_read(path)), "")
