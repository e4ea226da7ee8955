"""Limits of control groups of both versions, as the kernel writes them, and the threads that follow from them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from specrun.devices import control_group, processor
from specrun.errors import BackendError

VERSION_2 = {"own": "0::/a/b\n", "root/a/cpu.max": "150000 100000\n", "root/a/b/cpu.max": "max 100000\n"}
CONTAINER_2 = {
    "own": "0::/\n",
    "root/cpu.max": "50000 100000\n",
    "root/memory.max": "900",
    "root/memory.current": "200",
}
VERSION_1 = {
    "own": "5:memory:/a\n4:cpu,cpuacct:/a/b\n0::/\n",
    "root/cpu,cpuacct/a/b/cpu.cfs_quota_us": "-1\n",
    "root/cpu,cpuacct/a/b/cpu.cfs_period_us": "100000\n",
    "root/cpu,cpuacct/a/cpu.cfs_quota_us": "200000\n",
    "root/cpu,cpuacct/a/cpu.cfs_period_us": "100000\n",
    "root/memory/a/memory.limit_in_bytes": "1000",
    "root/memory/a/memory.usage_in_bytes": "1200",
    "root/memory/memory.limit_in_bytes": "9223372036854771712",
    "root/memory/memory.usage_in_bytes": "5000",
}
CONTAINER_1 = {
    "own": "4:cpu,cpuacct:/docker/0123\n",
    "root/cpu/cpu.cfs_quota_us": "300000\n",
    "root/cpu/cpu.cfs_period_us": "100000\n",
}
UNLIMITED = {"own": "0::/../a\nnonsense\n", "root/cpu.max": "max 100000\n", "root/memory.max": "max\n"}


@pytest.mark.parametrize(
    ("files", "cpus", "memory"),
    [
        (VERSION_2, 1.5, None),
        (CONTAINER_2, 0.5, 700),
        (VERSION_1, 2.0, 0),
        (CONTAINER_1, 3.0, None),
        (UNLIMITED, None, None),
        ({}, None, None),
    ],
)
def test_the_tightest_limit_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], cpus: float | None, memory: int | None
) -> None:
    in_groups(tmp_path, monkeypatch, files)
    assert (control_group.cpu_limit(), control_group.memory_left()) == (cpus, memory)


def in_groups(root: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str]) -> None:
    """Let this process be in the groups of ``files``."""
    for name, content in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    monkeypatch.setattr(control_group, "_ROOT", root / "root")
    monkeypatch.setattr(control_group, "_OWN", root / "own")


@pytest.mark.parametrize(("quota", "cores"), [("50000", 1), ("150000", 2), ("400000", 4), ("900000", 8), ("max", 8)])
def test_a_quota_bounds_the_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quota: str, cores: int) -> None:
    in_groups(tmp_path, monkeypatch, {"own": "0::/\n", "root/cpu.max": f"{quota} 100000\n"})
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8))
    monkeypatch.delenv("SPECRUN_THREADS", raising=False)
    assert processor.usable_cores() == processor.num_threads() == cores
    monkeypatch.setenv("SPECRUN_THREADS", "5")
    assert processor.num_threads() == 5
    assert ", 5 cores" in processor.describe_processor()


@pytest.mark.parametrize("wanted", ["0", "two", "-1", "1.5", "99999"])
def test_a_wrong_number_of_threads_is_said(monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    monkeypatch.setenv("SPECRUN_THREADS", wanted)
    with pytest.raises(BackendError, match=rf"SPECRUN_THREADS '{wanted}': expected a number from 1 to 1024"):
        processor.num_threads()
