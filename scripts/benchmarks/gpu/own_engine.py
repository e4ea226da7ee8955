"""Times of our own kernels for decoders, at the shapes of real models, beside what the card's memory allows.

Weights are random and are made on the GPU, so this needs no checkpoint and takes seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np

from scripts.benchmarks.gpu.decoders import cache_length_of, describe_decoder, describe_engine
from scripts.benchmarks.gpu.engines import measure_calls
from scripts.benchmarks.gpu.results import Results
from scripts.benchmarks.gpu.sizes import Shape, Size
from scripts.benchmarks.gpu.timing import mean_seconds, read_bandwidth
from specrun.devices import DeviceArray
from specrun.devices.cuda import CudaDevice
from specrun.engine_dir.layers import Decoder, Layer, Linear
from specrun.gpu.backend import Feed
from specrun.gpu.decoder.backend import CudaBackend
from specrun.gpu.decoder.kernels import Tokens
from specrun.gpu.kernels import open_gpu

_RANDOM_BYTES = 32 << 20
_PASSES = ((1, 1), (1, 5), (4, 1), (4, 5), (8, 1), (8, 5))
"""Rows, and tokens of each, of the passes whose kernels are timed one by one."""
_DRAFT_LEN = 10


def measure_own_engine(results: Results, size: Size) -> None:
    """Whole passes and each kernel of each shape."""
    for name, shape in size.shapes:
        results.attempt(name, _measure, shape, size)


def _measure(results: Results, shape: Shape, size: Size) -> None:
    device = open_gpu(0)
    try:
        bandwidth = read_bandwidth(device, size.copied_bytes)
        rows, max_seq_len = size.batches[-1], size.max_seq_len
        decoder = describe_decoder(shape, cache_length_of(max_seq_len, _DRAFT_LEN))
        config = describe_engine(decoder, size, rows, max_seq_len, _DRAFT_LEN)
        backend = CudaBackend(config, decoder, _random_weights(device, decoder), device)
        results.put(bytes_per_second=bandwidth, weight_bytes=backend.config.weight_bytes)
        measure_calls(results, backend, device, size, bandwidth)
        for rows, row_tokens in _PASSES:
            if rows <= size.batches[-1]:
                place = results.part("kernels")
                place.attempt(f"{rows} x {row_tokens}", _time_kernels, backend, rows, row_tokens, size, bandwidth)
        backend.close()
    finally:
        device.close()


def _time_kernels(
    results: Results, backend: CudaBackend, rows: int, row_tokens: int, size: Size, bandwidth: float
) -> None:
    """Each kernel over all layers, behind long texts, recorded."""
    device, kernels, decoder = backend.device, backend.kernels, backend.decoder
    tokens, buffers, count = Tokens(0, rows, 0, row_tokens), backend.kernels.buffers, rows * row_tokens
    ids, indices = device.zeros((rows, row_tokens), np.int64), device.zeros((rows, 1), np.int64)
    starts = device.zeros((rows,), np.int64)
    length = size.max_seq_len - row_tokens
    device.write(starts, np.full(rows, length))
    logits = device.zeros((rows, 1, decoder.vocab_size), np.float32)
    backend.enqueue(Feed(ids, starts, indices), logits, 0, fixed=False)  # Every token now knows where it stands.
    caches = backend.cache.part(0, backend.cache.rows)
    layers = list(zip(decoder.layers, caches[::2], caches[1::2], strict=True))
    kernel = Callable[[Layer, DeviceArray, DeviceArray], None]
    works: dict[str, kernel] = {
        "heads": lambda layer, keys, values: kernels.project_heads(tokens, layer, buffers.stream, keys, values),
        "attention": lambda layer, keys, values: kernels.attend(tokens, layer.attention, keys, values),
        "output": lambda layer, *_: kernels.add_projected(buffers.attended, count, layer.output, None),
        "gate_up": lambda layer, *_: kernels.project_gated(count, layer),
        "down": lambda layer, *_: kernels.add_projected(buffers.gated, count, layer.down, None),
    }
    layer = decoder.layers[0]
    read = {
        "heads": _bytes(decoder, layer.heads),
        "attention": 2 * rows * (length + row_tokens) * decoder.num_kv_heads * decoder.head_dim * 2,
        "output": _bytes(decoder, layer.output),
        "gate_up": _bytes(decoder, layer.gate_up),
        "down": _bytes(decoder, layer.down),
        "logits": _bytes(decoder, decoder.head),
    }

    def put(name: str, seconds: float) -> None:
        results.part(name).put(us=seconds * 1e6, share_of_bandwidth=read[name] / seconds / bandwidth)

    def over_layers(work: kernel) -> None:
        for each in layers:
            work(*each)

    for name, work in works.items():
        seconds = mean_seconds(device, partial(over_layers, work), calls=size.calls)
        put(name, seconds / len(layers))
    put("logits", mean_seconds(device, lambda: kernels.project_logits(rows, logits), calls=size.calls))


def _bytes(decoder: Decoder, linear: Linear) -> int:
    return decoder.tensors[linear.weight].nbytes


def _random_weights(device: CudaDevice, decoder: Decoder) -> dict[str, DeviceArray]:
    """Small random numbers, the same few megabytes again and again."""
    rng = np.random.default_rng(0)
    numbers = min(_RANDOM_BYTES, max(tensor.nbytes for tensor in decoder.tensors.values())) // 2
    random = device.zeros((numbers,), np.uint16)
    device.write(random, (rng.normal(size=numbers) * 0.02).astype(np.float16).view(np.uint16))
    weights = {}
    for name, tensor in decoder.tensors.items():
        weights[name] = array = device.zeros(tensor.shape, tensor.dtype)
        if tensor.dtype == "float32":
            device.write(array, np.ones(tensor.shape, np.float32))
            continue
        count = math.prod(tensor.shape)
        flat = DeviceArray(array.address, (count,), array.dtype)
        for first in range(0, count, numbers):
            part = min(numbers, count - first)
            device.copy(flat.part(first, (part,)), random.part(0, (part,)))
    return weights
