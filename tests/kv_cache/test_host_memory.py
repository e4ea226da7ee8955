"""What is free on this machine, and what is said where it is not enough."""

from __future__ import annotations

from pathlib import Path

import pytest

from specrun.devices import control_group
from specrun.kv_cache import host_memory


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files as Linux has them: 10 GB free, no limit."""
    monkeypatch.setattr(host_memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(control_group, "_ROOT", tmp_path)
    monkeypatch.setattr(control_group, "_OWN", tmp_path / "own")
    (tmp_path / "own").write_text("0::/\n")
    (tmp_path / "memory.current").write_text("3000000000\n")
    (tmp_path / "meminfo").write_text(
        "MemTotal:       32000000 kB\nMemAvailable:   10000000 kB\nHugePages_Total:    0\n"
    )
    return tmp_path


def test_free_memory_is_the_machines_or_the_control_groups(machine: Path) -> None:
    assert host_memory.free_memory() == 10_240_000_000
    (machine / "memory.max").write_text("max\n")
    assert host_memory.free_memory() == 10_240_000_000
    (machine / "memory.max").write_text("4000000000\n")
    assert host_memory.free_memory() == 1_000_000_000
    (machine / "memory.max").write_text("2000000000\n")
    assert host_memory.free_memory() == 0


def test_where_nobody_tells_nothing_is_refused(machine: Path) -> None:
    (machine / "meminfo").unlink()
    assert host_memory.free_memory() is None
    assert host_memory.shortage("weights", 10**15, "no") is None


def test_a_shortage_is_told_with_the_numbers(machine: Path) -> None:
    assert host_memory.shortage("weights", 9_000_000_000, "use a smaller model") is None
    error = host_memory.shortage("weights", 10_000_000_000, "use a smaller model")
    assert str(error) == "not enough memory: weights: 10.00 GB, and 10.24 GB are free; use a smaller model"


def test_this_machine_tells() -> None:
    free = host_memory.free_memory()
    assert free is None or 0 < free < 1 << 50
