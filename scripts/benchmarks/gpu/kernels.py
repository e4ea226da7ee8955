"""Times of the project's own kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from scripts.benchmarks.gpu.results import Figures, Results
from scripts.benchmarks.gpu.sizes import Size
from scripts.benchmarks.gpu.timing import mean_seconds
from specrun.devices import Device, swap
from specrun.kv_cache import BLOCK
from specrun.request import MAX_LOGPROBS, Request
from specrun.rounds.device import DISTRIBUTION
from specrun.rounds.device_rows import PROGRESS, TOKEN_VALUE, DeviceRows
from specrun.sampling import SamplingParams

_DRAFT_LEN, _WIDTH = 4, 4096
_WAYS: dict[str, Figures] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top_k and top_p": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "logits": {"temperature": 0.8, "use_logits": 1},
}


def time_kernels(results: Results, device: Device, size: Size) -> None:
    """Microseconds of each kernel, for every vocabulary and number of rows, and bytes a second of the memory's."""
    results.put(unit="microseconds", draft_len=_DRAFT_LEN)
    results.attempt("memory", _time_memory, device, size)
    for rows in size.rows:
        for vocab in size.vocabularies:
            results.part(f"vocabulary {vocab}").attempt(f"{rows} rows", _time, device, rows, vocab, size)


def _time(results: Results, device: Device, rows: int, vocab: int, size: Size) -> None:
    """Of rows that draft four tokens."""
    state, calls = _prepare(device, rows, vocab)
    usual = device.mirror(state.sampling)
    device.fetch(state.sampling, usual)
    device.wait()
    for way, values in _WAYS.items():
        sampling = usual.copy()
        for name, value in values.items():
            sampling[name] = value
        device.write(state.sampling, sampling)
        for kernel, call in calls.items():
            results.require_time()
            # Acceptance commits up to five tokens a call; there is room for all of them.
            device.write(state.progress, np.array([(8, _WIDTH)] * rows, PROGRESS))
            microseconds = mean_seconds(device, call, calls=size.calls) * 1e6
            results.part(way).put(**{kernel: microseconds})


def _prepare(device: Device, rows: int, vocab: int) -> tuple[DeviceRows, dict[str, Callable[[], None]]]:
    """The rows of a round, and a call of each of its kernels."""
    g = _DRAFT_LEN
    rng = np.random.default_rng(0)
    logits, draft_logits = (device.zeros((rows, count, vocab), np.float32) for count in (g + 1, g))
    for array in (logits, draft_logits):
        device.write(array, (rng.normal(size=array.shape) * 3).astype(np.float32))
    state = DeviceRows(device, rows, _WIDTH, vocab)
    # Penalties and log-probabilities are queued only for requests that want them; here all want everything.
    params = SamplingParams(presence_penalty=0.5, logit_bias={1: 1.0})
    state.begin(0, [Request([1] * 8, params, 1, draft_len=g, logprobs=MAX_LOGPROBS) for _ in range(rows)], g, False)
    p, q = device.zeros((rows, g + 1), DISTRIBUTION), device.zeros((rows, g), DISTRIBUTION)
    chosen, records = device.zeros((rows, g + 1), np.int32), device.zeros((rows, 3 + g), np.int64)
    adjusted = device.zeros((rows, g + 1, vocab), np.float32)
    found = device.zeros((rows, g + 1, 1 + MAX_LOGPROBS), TOKEN_VALUE)
    inputs = [device.zeros((rows * (g + 1),), np.int64) for _ in range(3)]

    own, whole = (state.progress, g, state.sampling), state.state(g)
    # The draft's logits of a step lie behind those of the step before.
    drafted = (q, draft_logits, rows * vocab, vocab, vocab)
    one, each = (rows, 1), (rows, g + 1)
    counted = (state.counts, vocab, state.biases, state.stop_ids, adjusted)
    calls: dict[str, tuple[Any, ...]] = {
        "feed": (one, state.tokens, _WIDTH, state.progress, -1, g + 1, -1, g + 1, _WIDTH, vocab, *inputs),
        "draw_draft": (one, draft_logits, vocab, vocab, *whole, 0, q),
        "judge_target": (each, logits, vocab, *own, p, chosen),
        "accept": (one, *whole, *drafted, p, chosen, logits, vocab, state.stop_ids, state.counts, 0, records),
        "adjust": (each, logits, vocab, vocab, g + 1, 0, *whole, *counted),
        "log_probabilities": (each, logits, vocab, g, state.sampling, records, found),
    }
    return state, {kernel: functools.partial(device.launch, kernel, *call) for kernel, call in calls.items()}


def _time_memory(results: Results, device: Device, size: Size) -> None:
    """What changes places or is kept between rounds, as a cache of 16 heads of 64 channels in 16 bits holds it."""
    heads, width = 16, 64
    length = max(BLOCK, size.max_seq_len // BLOCK * BLOCK)
    row, other = (device.zeros((heads, length, width), np.uint16) for _ in range(2))
    blocks = length // BLOCK
    pool, numbers = device.zeros((blocks, heads, BLOCK, width), np.uint16), device.zeros((blocks,), np.int32)
    device.write(numbers, np.arange(blocks, dtype=np.int32))
    save = ((blocks, heads), row, heads, length, width, 0, pool, numbers, 1)
    works: dict[str, tuple[int, Callable[[], None]]] = {
        "swap": (4, lambda: swap(device, row, other)),
        "copy_blocks": (2, lambda: device.launch("copy_blocks", *save)),
        "copy": (2, lambda: device.copy(row, other)),
        "clear": (1, lambda: device.clear(row)),
    }
    for name, (moved, work) in works.items():
        seconds = mean_seconds(device, work, calls=size.calls)
        results.part(name).put(bytes=row.nbytes, us=seconds * 1e6, bytes_per_second=moved * row.nbytes / seconds)
