"""Times of our own kernels for decoders, at the shapes of real models, beside what the card's memory allows.

Weights are random and are made on the GPU, so this needs no checkpoint and takes seconds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np

from scripts.benchmarks.gpu.engines import measure_calls
from scripts.benchmarks.gpu.results import Results
from scripts.benchmarks.gpu.sizes import Shape, Size
from scripts.benchmarks.gpu.timing import mean_seconds, read_bandwidth
from specrun.devices import DeviceArray
from specrun.devices.cuda import CudaDevice
from specrun.engine_dir.cache_tensors import CacheTensor
from specrun.engine_dir.config import (
    LAYER_WEIGHTS_NAME,
    LAYERS_NAME,
    BackendInfo,
    BuildConfig,
    EngineConfig,
    FileInfo,
    GraphInfo,
    Provenance,
)
from specrun.engine_dir.layers import (
    KERNELS,
    TILE,
    Attention,
    Decoder,
    Layer,
    Linear,
    Norm,
    TensorType,
    place_tensors,
)
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
        decoder = _decoder(shape, size)
        backend = CudaBackend(_config(decoder, size), decoder, _random_weights(device, decoder), device)
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
        "heads": lambda layer, keys, values: kernels.project_heads(tokens, layer, keys, values),
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


def _decoder(shape: Shape, size: Size) -> Decoder:
    """Every layer has weights of its own, as a GPU's cache would hold shared ones."""
    tensors: list[tuple[str, tuple[int, ...], TensorType]] = []

    def vector(name: str, *sizes: int) -> str:
        tensors.append((name, sizes, "float32"))
        return name

    def linear(name: str, outputs: int, inputs: int) -> Linear:
        tensors.append((name, (-(-outputs // TILE), inputs // TILE, TILE * TILE), "uint16"))
        return Linear(weight=name, inputs=inputs, outputs=outputs)

    length, queries = _cache_length(size), shape.heads * shape.head_dim
    norm = Norm(weight=vector("norm", shape.width), epsilon=1e-5)
    cos, sin = (vector(name, length, shape.head_dim // 2) for name in ("cos", "sin"))
    attention = Attention(scale=1 / math.sqrt(shape.head_dim), rotated=shape.head_dim, cos=cos, sin=sin)
    layers = [
        Layer(
            input_norm=norm,
            heads=linear(f"{number}.heads", queries + 2 * shape.kv_heads * shape.head_dim, shape.width),
            attention=attention,
            output=linear(f"{number}.output", shape.width, queries),
            mlp_norm=norm,
            gate_up=linear(f"{number}.gate_up", 2 * shape.gated, shape.width),
            activation="silu",
            down=linear(f"{number}.down", shape.width, shape.gated),
        )
        for number in range(shape.layers)
    ]
    head = linear("head", shape.vocab_size, shape.width)
    return Decoder(
        dtype="float16",
        width=shape.width,
        vocab_size=shape.vocab_size,
        cache_length=length,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        embedding=head,
        layers=layers,
        norm=norm,
        head=head,
        tensors=place_tensors(tensors),
    )


def _cache_length(size: Size) -> int:
    return -(-(size.max_seq_len + _DRAFT_LEN + 1) // 8) * 8


def _config(decoder: Decoder, size: Size) -> EngineConfig:
    caches = [CacheTensor(heads=decoder.num_kv_heads, head_dim=decoder.head_dim)] * (2 * len(decoder.layers))
    weights = sum(tensor.nbytes for tensor in decoder.tensors.values())
    unknown = "0" * 64
    return EngineConfig(
        backend=BackendInfo(name="cuda", version=KERNELS, device="cuda", machine="", capturable=True),
        build_config=BuildConfig(
            max_batch_size=size.batches[-1],
            max_input_len=size.max_input_len,
            max_seq_len=size.max_seq_len,
            max_draft_len=_DRAFT_LEN,
            speculative_decoding_mode="draft_tokens_external",
            gather_generation_logits=False,
            cache_length=decoder.cache_length,
            profiles=[],
        ),
        graph=GraphInfo(vocab_size=decoder.vocab_size, dtype="float16", caches=caches),
        io=[],
        tokenizer=None,
        eos_token_ids=[],
        pretrained_config={},
        provenance=Provenance(tool="gpu_check", created="", source="", versions={}),
        files={
            LAYERS_NAME: FileInfo(bytes=0, sha256=unknown),
            LAYER_WEIGHTS_NAME: FileInfo(bytes=weights, sha256=unknown),
        },
    )


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
