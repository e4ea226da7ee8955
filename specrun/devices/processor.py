"""The processor that this process runs on, as far as it decides which kernels compute."""

from __future__ import annotations

import math
import os
import platform
from functools import cache
from pathlib import Path

from specrun.devices.control_group import cpu_limit
from specrun.errors import BackendError

_FEATURES = {
    *("fma", "avx2", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16", "avx512_fp16", "avx_vnni", "avx_vnni_int8"),
    *("amx_tile", "amx_int8", "amx_bf16", "asimddp", "i8mm", "bf16", "sve", "sve2", "sme", "sme2"),
}
"""Processor features by which ONNX Runtime chooses kernels, in Linux's words."""
THREADS = "SPECRUN_THREADS"
"""The environment variable of ``--threads``."""
_MOST_THREADS = 1024


@cache
def _info() -> dict[str, str]:
    """The first processor's lines of /proc/cpuinfo; empty where there is none."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    pairs = [line.partition(":") for line in lines]
    return {name.strip(): value.strip() for name, _, value in reversed(pairs)}


def processor_name() -> str:
    """The processor's name for people."""
    return _info().get("model name") or platform.processor() or platform.machine()


def usable_cores() -> int:
    """Cores that this process may use, by its affinity and its control group's quota, rounded up.

    macOS and Windows do not say; there it is all cores of the machine.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = cpu_limit()
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def num_threads() -> int:
    """Threads that an engine computes with: ``SPECRUN_THREADS``, or one a core. Raises BackendError."""
    if not (wanted := os.environ.get(THREADS, "")):
        return usable_cores()
    if not wanted.isdecimal() or not 0 < int(wanted) <= _MOST_THREADS:
        raise BackendError(f"{THREADS} {wanted!r}: expected a number from 1 to {_MOST_THREADS}")
    return int(wanted)


def features() -> set[str]:
    """What kernels are chosen by, as far as this processor has it."""
    return _FEATURES & set((_info().get("flags") or _info().get("Features") or "").split())


def describe_processor() -> str:
    """The name, the threads of an engine, and the features that kernels are chosen by. Raises BackendError.

    Threads are called cores, as in engines of before, which are recognised by this text.
    """
    names = sorted(features())
    return ", ".join([processor_name(), f"{num_threads()} cores", *([" ".join(names)] if names else [])])
