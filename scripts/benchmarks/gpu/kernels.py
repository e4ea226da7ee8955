"""Times of the project's own kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from scripts.benchmarks.gpu.results import Figures, Results
from scripts.benchmarks.gpu.sizes import Size
from scripts.benchmarks.gpu.timing import mean_seconds
from specrun.devices import Device
from specrun.engine_dir.cache_tensors import CacheTensor
from specrun.gpu.cache import DeviceKVCache
from specrun.gpu.kernels import calls
from specrun.gpu.kernels.layout import DISTRIBUTION, PROGRESS, TOKEN_VALUE, record_len
from specrun.gpu.rows import DeviceRows
from specrun.kv_cache import BLOCK
from specrun.request.options import RequestOptions
from specrun.request.request import Request
from specrun.sampling.limits import MAX_LOGPROBS
from specrun.sampling.sampler import SamplingParams

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
    state, works = _prepare(device, rows, vocab)
    usual = device.pinned_like(state.sampling)
    device.copy_to_host(state.sampling, usual)
    device.wait()
    for way, values in _WAYS.items():
        sampling = usual.copy()
        for name, value in values.items():
            sampling[name] = value
        device.write(state.sampling, sampling)
        for kernel, work in works.items():
            results.require_time()
            # Acceptance commits up to five tokens a call; there is room for all of them.
            device.write(state.progress, np.array([(8, _WIDTH)] * rows, PROGRESS))
            microseconds = mean_seconds(device, work, calls=size.calls) * 1e6
            results.part(way).put(**{kernel: microseconds})


def _prepare(device: Device, rows: int, vocab: int) -> tuple[DeviceRows, dict[str, Callable[[], None]]]:
    """The rows of a round, and a call of each of its kernels."""
    g = _DRAFT_LEN
    rng = np.random.default_rng(0)
    logits, draft_logits = (device.zeros((rows, count, vocab), np.float32) for count in (g + 1, g))
    for array in (logits, draft_logits):
        device.write(array, (rng.normal(size=array.shape) * 3).astype(np.float32))
    state = DeviceRows(device, rows, _WIDTH, vocab, g + 1, g, use_logits=False)
    # Kernels do nothing for rows that want no penalties or log-probabilities; here all want everything.
    params = SamplingParams(presence_penalty=0.5, logit_bias={1: 1.0})
    state.begin(
        0,
        [Request([1] * 8, params, 1, options=RequestOptions(draft_len=g, logprobs=MAX_LOGPROBS)) for _ in range(rows)],
    )
    p, q = device.zeros((rows, g + 1), DISTRIBUTION), device.zeros((rows, g), DISTRIBUTION)
    chosen, records = device.zeros((rows, g + 1), np.int32), device.zeros((rows, record_len(g)), np.int64)
    adjusted = device.zeros((rows, g + 1, vocab), np.float32)
    logprobs = device.zeros((rows, g + 1, 1 + MAX_LOGPROBS), TOKEN_VALUE)
    masks = device.zeros((rows, g + 1, -(-vocab // 32)), np.uint32)
    inputs = {"input_ids": (rows, g + 1), "write_indices": (rows,), "logits_indices": (rows, g + 1)}
    fed = {name: device.zeros(shape, np.int64) for name, shape in inputs.items()}
    first = draft_logits.part(0, (rows, 1, vocab))
    call = functools.partial
    return state, {
        "feed": call(calls.feed, state, offset=-1, first_logit=-1, capacity=_WIDTH, vocab=vocab, **fed),
        "sample_draft": call(
            calls.sample_draft, state, logits=first, vocab=vocab, draft_len=g, step=0, distributions=q
        ),
        "sample_target": call(
            calls.sample_target, state, logits=logits, adjusted=adjusted, distributions=p, chosen=chosen
        ),
        "accept": call(
            calls.accept,
            state,
            q=q,
            draft_logits=draft_logits,
            step_stride=rows * vocab,  # The draft's logits of a step lie behind those of the step before.
            draft_stride=vocab,
            draft_vocab=vocab,
            p=p,
            chosen=chosen,
            target_logits=logits,
            adjusted=adjusted,
            records=records,
        ),
        "log_probabilities": call(calls.log_probabilities, state, logits=logits, records=records, logprobs=logprobs),
        "apply_penalties": call(
            calls.apply_penalties, state, logits=logits, vocab=vocab, first=0, draft_len=g, adjusted=adjusted
        ),
        "apply_masks": call(calls.apply_masks, state, masks=masks, vocab=vocab, adjusted=adjusted),
    }


def _time_memory(results: Results, device: Device, size: Size) -> None:
    """What changes places or is kept between rounds: rows of 32 layers of 8 heads with 128 channels in 16 bits."""
    length = max(BLOCK, size.max_seq_len // BLOCK * BLOCK)
    blocks = length // BLOCK
    cache = DeviceKVCache(device, [CacheTensor(heads=8, head_dim=128)] * size.cache_tensors, np.uint16, 2, length)
    cache.allocate_pool(blocks)
    one, other = (cache.part(row, 1)[0] for row in range(2))
    row_bytes = one.nbytes * size.cache_tensors
    works: dict[str, tuple[int, bool, Callable[[], None]]] = {
        "swap": (4 * row_bytes, True, lambda: cache.swap(0, 1, (length, length))),
        # It writes the numbers of the blocks, for which it waits.
        "save": (2 * row_bytes, False, lambda: cache.save(0, 0, range(blocks))),
        "copy": (2 * one.nbytes, True, lambda: device.copy(one, other)),
        "clear": (row_bytes, True, lambda: cache.clear(0)),
    }
    for name, (moved, capturable, work) in works.items():
        seconds = mean_seconds(device, work, capturable, size.calls)
        results.part(name).put(bytes_moved=moved, us=seconds * 1e6, bytes_per_second=moved / seconds)
