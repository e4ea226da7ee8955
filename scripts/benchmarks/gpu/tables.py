"""Whole rounds on any GPU: a table's own kernels stand where an engine's would, so rounds cost what is around engines.

A table of the largest vocabulary, and a draft that agrees with it often.
"""

from __future__ import annotations

import hashlib
import statistics
import time

import numpy as np

from scripts.benchmarks.gpu.results import Figures, Results
from scripts.benchmarks.gpu.sizes import Size
from scripts.benchmarks.gpu.soak import soak
from scripts.benchmarks.gpu.timing import Replays, cuda_device, watch_replays
from specrun.decoder import SpeculativeDecoder
from specrun.devices.driver import why_no_gpu
from specrun.request.request import Request
from specrun.sampling.sampler import Floats, SamplingParams
from tests.helpers.table_backend import open_on_gpus
from tests.helpers.tables import table_config

_ROWS = 64
"""Of the table: more would only take memory."""
_WEIGHT = 5
_DRAFT_LEN = 4
_ROUNDS_LENGTH = 256
WAYS: dict[str, SamplingParams] = {
    "greedy": SamplingParams(),
    "temperature": SamplingParams(0.8, seed=1),
    "top_k and top_p": SamplingParams(0.8, top_k=50, top_p=0.9, seed=1),
}


def measure_rounds(results: Results, size: Size) -> None:
    """Ids of recorded rounds and of pieces, and what a round takes the device and the host."""
    results.put(unit="microseconds", vocabulary=size.vocabulary, draft_len=_DRAFT_LEN)
    hashes: dict[str, dict[str, str]] = {}
    placements = {"graphs": (True, (0, 0)), "pieces": (False, (0, 0))}
    if why_no_gpu(1) is None:
        placements["two GPUs"] = (True, (0, 1))
    for name, (graphs, gpus) in placements.items():
        own = hashes[name] = {}
        results.attempt(name, _measure, size, graphs, gpus, own)
    expected = hashes["graphs"]
    results.put(identical_ids={name: bool(found) and found == expected for name, found in hashes.items()})


def soak_tables(results: Results, size: Size) -> None:
    """Requests that come and go for thousands of rounds."""
    soak(results, lambda graphs: _open(size, graphs, (0, 0)), size.soak_rounds, (1, 60))


def _tables(vocab: int) -> tuple[Floats, Floats]:
    rng = np.random.default_rng(0)
    target = (rng.normal(size=(min(_ROWS, vocab), vocab)) * 3).astype(np.float32)
    return target, target + rng.normal(size=target.shape).astype(np.float32)


def _open(size: Size, graphs: bool, gpus: tuple[int, int]) -> SpeculativeDecoder:
    length = _ROUNDS_LENGTH + 256
    config = table_config(
        size.vocabulary,
        max_batch_size=max(size.batches),
        max_input_len=128,
        max_seq_len=length - 16,
        cache_length=length,
    )
    return open_on_gpus(
        config,
        *_tables(size.vocabulary),
        weight=_WEIGHT,
        draft_len=_DRAFT_LEN,
        gpus=gpus,
        graphs=graphs,
        blocks=64,
    )


def _measure(results: Results, size: Size, graphs: bool, gpus: tuple[int, int], hashes: dict[str, str]) -> None:
    decoder = _open(size, graphs, gpus)
    try:
        replays = watch_replays(cuda_device(decoder))
        for batch in size.batches:
            for way, params in WAYS.items():
                results.require_time()
                found, ids = _rounds(decoder, replays, batch, params, size)
                hashes[f"{way}, batch {batch}"] = ids
                results.part(way).put(**{f"batch {batch}": found})
    finally:
        decoder.close()


def _rounds(
    decoder: SpeculativeDecoder, replays: Replays, batch: int, params: SamplingParams, size: Size
) -> tuple[Figures, str]:
    """Figures of one batch, and a hash of its ids."""
    length = min(_ROUNDS_LENGTH, 2 * size.output_len)
    ids, _ = _decode(decoder, batch, params, length)  # Prepares and records.
    _, walls = _decode(decoder, batch, params, length)
    with replays.timed() as times:
        _decode(decoder, batch, params, length)
    wall = statistics.median(walls)
    found: Figures = {"round_us": wall * 1e6, "rounds": len(walls)}
    if times:
        on_device = statistics.median(times)
        found |= {"device_us": on_device * 1e6, "host_us": (wall - on_device) * 1e6}
    return found, hashlib.sha256(repr(ids).encode()).hexdigest()


def _decode(
    decoder: SpeculativeDecoder, batch: int, params: SamplingParams, length: int
) -> tuple[list[list[int]], list[float]]:
    """The ids, and the seconds of every round but the first, which reads the prompts."""
    requests = [Request([3 + row, 5, 7], params, length) for row in range(batch)]
    for request in requests:
        decoder.scheduler.add(request)
    seconds = []
    while len(decoder.scheduler):
        began = time.perf_counter()
        decoder.scheduler.step()
        seconds.append(time.perf_counter() - began)
    return [request.output for request in requests], seconds[1:-1] or seconds
