"""What ``scripts/gpu_check.py`` does, part by part, in the order of what the figures are worth."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from scripts.benchmarks.gpu.card import measure_card
from scripts.benchmarks.gpu.checks import run_sanitizer, run_tests
from scripts.benchmarks.gpu.engines import measure_engine
from scripts.benchmarks.gpu.kernels import time_kernels
from scripts.benchmarks.gpu.models import engine_dir, make_engine, make_pair
from scripts.benchmarks.gpu.own_engine import measure_own_engine
from scripts.benchmarks.gpu.pairs import measure_lengths, measure_pair, soak_pair
from scripts.benchmarks.gpu.results import Results
from scripts.benchmarks.gpu.sizes import SIZES, Size
from scripts.benchmarks.gpu.tables import measure_rounds, soak_tables
from specrun.devices.cuda import CudaDevice
from specrun.gpu.kernels import open_gpu


@dataclass(frozen=True)
class Settings:
    """What is measured, and where everything lies."""

    size: str
    draft_len: int
    work_dir: Path
    output: Path

    @property
    def sizes(self) -> Size:
        """The size of this name."""
        return SIZES[self.size]


class Part(NamedTuple):
    """``work`` fills a part of the file of results."""

    name: str
    of_backend: bool
    """Whether it is done for every backend."""
    work: Callable[[Results, Settings, str], None]
    """The last is the backend's name."""


@contextmanager
def _device() -> Iterator[CudaDevice]:
    device = open_gpu(0)
    try:
        yield device
    finally:
        device.close()


def _time_kernels(results: Results, settings: Settings, backend: str) -> None:
    with _device() as device:
        time_kernels(results, device, settings.sizes)


def _build(results: Results, settings: Settings, backend: str) -> None:
    """The pair, then the target for other lengths of cache."""
    with _device() as device:
        free = device.free_memory()[0]
    size = settings.sizes
    for length in (size.max_seq_len, *size.cache_lengths[1:]):
        for role in ("target", "draft") if length == size.max_seq_len else ("target",):
            given = (backend, settings.work_dir, role, length, settings.draft_len, size, free)
            results.attempt(f"{role} {length}", make_engine, *given)


def _measure_engines(results: Results, settings: Settings, backend: str) -> None:
    """Those that were built."""
    size = settings.sizes
    engines = [("target", length) for length in size.cache_lengths]
    engines.insert(1, ("draft", size.max_seq_len))
    layers = Results.in_file(settings.output.with_suffix(".layers.json")).part(backend)
    for role, length in engines:
        directory = engine_dir(settings.work_dir, backend, length, role)
        results.attempt(f"{role} {length}", measure_engine, directory, size, layers.part(f"{role} {length}"))


def _pair(settings: Settings, backend: str) -> tuple[Path, Path]:
    length = settings.sizes.max_seq_len
    target, draft = (engine_dir(settings.work_dir, backend, length, role) for role in ("target", "draft"))
    return target, draft


def _measure_pair(results: Results, settings: Settings, backend: str) -> None:
    measure_pair(results, *_pair(settings, backend), settings.draft_len, settings.sizes)


def _measure_lengths(results: Results, settings: Settings, backend: str) -> None:
    measure_lengths(results, *_pair(settings, backend), settings.sizes)


def _soak_pair(results: Results, settings: Settings, backend: str) -> None:
    soak_pair(results, *_pair(settings, backend), settings.draft_len, settings.sizes)


PARTS = (
    Part("card", False, lambda results, settings, _: measure_card(results, settings.sizes)),
    Part("own engine", False, lambda results, settings, _: measure_own_engine(results, settings.sizes)),
    Part("tables", False, lambda results, settings, _: measure_rounds(results, settings.sizes)),
    Part("tests", False, lambda results, settings, _: run_tests(results, settings.sizes)),
    Part(
        "models",
        False,
        lambda results, settings, _: make_pair(results, settings.sizes, settings.work_dir),
    ),
    Part("build", True, _build),
    Part("pair", True, _measure_pair),
    Part("lengths", True, _measure_lengths),
    Part("engines", True, _measure_engines),
    Part("kernels", False, _time_kernels),
    Part("soak of tables", False, lambda results, settings, _: soak_tables(results, settings.sizes)),
    Part("soak", True, _soak_pair),
    Part("sanitizer", False, lambda results, settings, _: run_sanitizer(results, settings.sizes)),
)
