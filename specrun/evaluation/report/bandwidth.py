"""How near passes of an engine come to the memory's bandwidth: bytes read a second, beside a probe that only reads.

A pass reads every weight once, whatever its width, so it takes at least as long as to read as many bytes. Keys and
values are not counted, and all experts of a mixture are.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from specrun.devices.processor import num_threads
from specrun.engine_dir.config import EngineConfig, engine_files, read_config
from specrun.errors import EngineDirError
from specrun.evaluation.bench_results import Result, Split
from specrun.optional_packages import import_package

if TYPE_CHECKING:
    import onnx_ir as ir

_PROBED = 1 << 29
"""Bytes that all cores read together: more than their caches hold."""
_LOOKUPS = {"Gather", "GatherBlockQuantized"}
"""Operators that read some rows of a table."""


@dataclass(frozen=True)
class Share:
    """Passes of one kind, and the bandwidth that they reach."""

    name: str
    weight_bytes: int
    """Bytes of weights that a pass reads."""
    milliseconds: float
    """Milliseconds of one pass."""
    limit: float
    """Bytes a second that the probe reads."""

    @property
    def bandwidth(self) -> float:
        """Bytes a second that passes read."""
        return self.weight_bytes / self.milliseconds * 1e3

    @property
    def share(self) -> float:
        """Bandwidth of the passes / bandwidth of the probe."""
        return self.bandwidth / self.limit


def shares(target: Path, draft: Path | None, results: Sequence[Result]) -> list[Share]:
    """Shares of the target's steps and of the draft's, by their times in ``results``; none where these were not timed.

    Engines run on the CPU. Raises ModuleNotFoundError without onnx_ir.
    """
    limit = read_speed()
    splits = [result.split for result in results if result.split]
    kinds: list[tuple[str, Path | None, Callable[[Split], float]]] = [
        ("target, a step alone", target, lambda split: split.target_step_ms.median),
        ("target, verifying", target, lambda split: split.verify_ms.median),
        ("draft, a step", draft, lambda split: split.draft_step_ms.median),
    ]
    shares_of_pair = []
    for name, directory, time_of in kinds:
        times = [milliseconds for split in splits if (milliseconds := time_of(split))]
        if directory and times:
            shares_of_pair.append(Share(name, weight_bytes_of(directory), median(times), limit))
    return shares_of_pair


def weight_bytes_of(directory: Path) -> int:
    """Bytes of weights that a pass of an engine for ONNX Runtime reads. Raises ModuleNotFoundError without onnx_ir."""
    onnx_ir = import_package("onnx_ir")
    config = read_config(directory, EngineConfig, EngineDirError, "specbuild engine")
    graphs = engine_files(config.backend.name, config.build_config.tp_size)
    return sum(weight_bytes(onnx_ir.load(directory / graph).graph) for graph in graphs)


def weight_bytes(graph: ir.Graph) -> int:
    """Bytes of all constants, but for tables of which only some rows are read."""
    read = {}
    for node in graph.all_nodes():
        for index, value in enumerate(node.inputs):
            if value is not None and value.const_value is not None and not (node.op_type in _LOOKUPS and index == 0):
                read[value] = math.ceil(value.const_value.nbytes)
    return sum(read.values())


def read_speed() -> float:
    """Bytes a second that all cores read together, of memory that no cache holds. They are only combined by XOR."""
    cores = num_threads()
    parts = [np.ones(_PROBED // 8 // cores, np.uint64) for _ in range(cores)]
    with ThreadPoolExecutor(cores) as pool:
        seconds = fastest(lambda: list(pool.map(np.bitwise_xor.reduce, parts)), 5)
    return sum(part.nbytes for part in parts) / seconds


def fastest(run: Callable[[], object], passes: int) -> float:
    """Seconds that the fastest of a few passes takes."""
    times = []
    for _ in range(passes):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return min(times)
