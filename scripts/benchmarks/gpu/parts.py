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
from scripts.benchmarks.gpu.models import ROLES, build_pair, engine_dir
from scripts.benchmarks.gpu.own_engine import measure_own_engine
from scripts.benchmarks.gpu.pairs import measure_lengths, measure_pair, soak_pair
from scripts.benchmarks.gpu.peer import measure_peer
from scripts.benchmarks.gpu.profiles import measure_kernels_of_passes
from scripts.benchmarks.gpu.results import Results
from scripts.benchmarks.gpu.sizes import SIZES, Size
from scripts.benchmarks.gpu.tables import measure_rounds, soak_tables
from scripts.benchmarks.gpu.under_load import measure_first_token, measure_long_texts, measure_queue
from specrun.devices.cuda import CudaDevice
from specrun.gpu.kernels import open_gpu


@dataclass(frozen=True)
class Settings:
    """What is measured, and where everything lies."""

    size: str
    draft_len: int
    work_dir: Path
    output: Path
    quick: bool = False

    @property
    def sizes(self) -> Size:
        """The size of this name."""
        return SIZES[self.size].quick() if self.quick else SIZES[self.size]


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
    with _device() as device:
        free = device.free_memory()[0]
    build_pair(results, backend, settings.work_dir, settings.draft_len, settings.sizes, free)


def _measure_engines(results: Results, settings: Settings, backend: str) -> None:
    """Those that were built."""
    layers = Results.in_file(settings.output.with_suffix(".layers.json")).part(backend)
    for role in ROLES:
        directory = engine_dir(settings.work_dir, backend, role)
        results.attempt(role, measure_engine, directory, settings.sizes, layers.part(role))


MeasurePair = Callable[[Results, Path, Path, int, Size], None]
"""Fills results with figures of a target and a draft engine, for drafts of so many tokens."""


def _of_pair(name: str, measure: MeasurePair) -> Part:
    def work(results: Results, settings: Settings, backend: str) -> None:
        target, draft = (engine_dir(settings.work_dir, backend, role) for role in ROLES)
        measure(results, target, draft, settings.draft_len, settings.sizes)

    return Part(name, True, work)


PARTS = (
    Part("card", False, lambda results, settings, _: measure_card(results, settings.sizes)),
    Part("own engine", False, lambda results, settings, _: measure_own_engine(results, settings.sizes)),
    Part("build", True, _build),
    _of_pair("pair", measure_pair),
    _of_pair("profile", measure_kernels_of_passes),
    Part("peer", False, lambda results, settings, _: measure_peer(results, settings.sizes)),
    _of_pair("long", measure_long_texts),
    _of_pair("queue", measure_queue),
    _of_pair("first token", measure_first_token),
    _of_pair("lengths", measure_lengths),
    Part("tests", False, lambda results, settings, _: run_tests(results, settings.sizes)),
    Part("tables", False, lambda results, settings, _: measure_rounds(results, settings.sizes)),
    Part("engines", True, _measure_engines),
    Part("kernels", False, _time_kernels),
    Part("soak of tables", False, lambda results, settings, _: soak_tables(results, settings.sizes)),
    _of_pair("soak", soak_pair),
    Part("sanitizer", False, lambda results, settings, _: run_sanitizer(results, settings.sizes)),
)
