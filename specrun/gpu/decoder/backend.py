"""Runs a decoder by specrun's own kernels. Its logits are the same bits for every division into passes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from pydantic import ValidationError
from typing_extensions import override

from specrun.devices import DeviceArray
from specrun.devices.cuda import CudaDevice
from specrun.engine_dir.config import LAYER_WEIGHTS_NAME, LAYERS_NAME, EngineConfig
from specrun.engine_dir.contract import FIRST_DRAFT_STEP_LEN
from specrun.engine_dir.layers import Decoder
from specrun.engine_dir.small_files import read_small
from specrun.errors import BackendError, EngineDirError
from specrun.gpu.backend import DeviceBackend, Feed, bound_tensors
from specrun.gpu.cache import DeviceKVCache
from specrun.gpu.decoder.kernels import Buffers, DecoderKernels, Tokens, attention_blocks, partial_size

PASS_TOKENS = 512
"""The most tokens of a pass; longer prompts take several."""
_MIN_ARCH = 80
"""Minimum compute capability, times 10: Ampere's tensor cores have the instruction of the kernels' products."""


class CudaBackend(DeviceBackend):
    """Runs an engine of specrun's own kernels. Owns the weights and the memory between kernels."""

    def __init__(
        self,
        config: EngineConfig,
        decoder: Decoder,
        weights: dict[str, DeviceArray],
        device: CudaDevice,
        cache_owner: DeviceBackend | None = None,
    ) -> None:
        """weights: every tensor of the decoder, on the device. cache_owner: a head's target. Raises BackendError."""
        if int(device.arch.removeprefix("sm_")) < _MIN_ARCH:
            raise BackendError(
                f"engines of specrun's own kernels need a GPU of compute capability 8.0 or newer, this one is "
                f"{device.arch}; build with --backend tensorrt"
            )
        self.config = config
        self.device, self.devices = device, [device]
        self.kernels = DecoderKernels(device, decoder, weights)
        self.decoder = decoder
        self._cache_owner = cache_owner

    @classmethod
    def open(
        cls, directory: Path, config: EngineConfig, device: CudaDevice, cache_owner: DeviceBackend | None = None
    ) -> CudaBackend:
        """Load an engine directory. Raises EngineDirError and BackendError."""
        decoder = _read(directory, config)
        weights = _load(directory / LAYER_WEIGHTS_NAME, decoder, device)
        return cls(config, decoder, weights, device, cache_owner)

    @property
    @override
    def capturable(self) -> bool:
        return True

    @property
    @override
    def workspace_bytes(self) -> int:
        return sum(math.prod(shape) * np.dtype(kind).itemsize for shape, kind in self._sizes())

    @override
    def allocate_cache(self) -> None:
        graph, build = self.config.graph, self.config.build_config
        storage = graph.cache_element.storage
        self.cache = DeviceKVCache(self.device, graph.own_tensors, storage, build.max_batch_size, build.cache_length)
        self.kernels.buffers = Buffers(*(self.device.zeros(shape, kind) for shape, kind in self._sizes()))

    @override
    def enqueue(self, feed: Feed, logits: DeviceArray, first: int, fixed: bool) -> None:
        caches = bound_tensors(self.cache, self._cache_owner, 0, self.cache.rows)
        for tokens in _passes(*feed.input_ids.shape):
            self._read_tokens(tokens, feed, first, caches)
        if part := self.decoder.head_input:
            self.kernels.keep_features(feed, first, part, caches[-1])
        self.kernels.project_logits(math.prod(feed.logits_indices.shape), logits)

    def _read_tokens(self, tokens: Tokens, feed: Feed, first: int, caches: Sequence[DeviceArray]) -> None:
        """Queue the layers for ``tokens`` of a feed. caches: keys and values by layer, then perhaps features."""
        kernels, buffers, count = self.kernels, self.kernels.buffers, tokens.count
        part, fusion = self.decoder.head_input, self.decoder.fusion
        kernels.begin(tokens, feed, first)
        if part:
            kernels.begin_head(count, part, caches[-1])
        x = buffers.joined if part and not part.linear else buffers.stream
        for number, layer in enumerate(self.decoder.layers):
            if fusion:
                kernels.join_state(count, fusion, number)
            keys, values = caches[2 * number : 2 * number + 2]
            kernels.project_heads(tokens, layer, buffers.stream if number else x, keys, values)
            kernels.attend(tokens, layer.attention, keys, values)
            kernels.add_projected(buffers.attended, count, layer.output, layer.output_norm)
            if layer.routing:
                kernels.choose_experts(count, layer, layer.routing)
                kernels.add_experts(count, layer, layer.routing)
            else:
                kernels.project_gated(count, layer)
                kernels.add_projected(buffers.gated, count, layer.down, layer.down_norm)
        if fusion:
            kernels.join_state(count, fusion, len(self.decoder.layers))
            kernels.write_features(count, fusion, caches[-1])
        kernels.keep_wanted(tokens, feed)

    @override
    def save_kernels(self) -> None:
        """Nothing: opening an engine compiles them in seconds."""

    @override
    def close(self) -> None:
        self.kernels.weights.clear()

    def _sizes(self) -> list[tuple[tuple[int, ...], type[np.generic]]]:
        """Shape and type of each of ``Buffers``."""
        decoder, build = self.decoder, self.config.build_config
        round_len = max(build.max_draft_len + 1, FIRST_DRAFT_STEP_LEN)
        rows, longest = build.max_batch_size, max(build.max_input_len, round_len)
        count = min(PASS_TOKENS, rows * longest)
        queries = decoder.num_heads * decoder.head_dim
        heads = decoder.num_heads + 2 * decoder.num_kv_heads
        # The widest pass whose attention is divided by positions, and the one with the most blocks.
        passes = [
            Tokens(0, min(rows, max(1, count // length)), 0, length) for length in range(1, min(count, longest) + 1)
        ]
        blocks = [(tokens.rows * decoder.num_kv_heads, *attention_blocks(decoder, tokens)) for tokens in passes]
        partial = max((math.prod(block) for block in blocks if block[2] > 1), default=1)
        counters = max(max(row_heads * tiles for row_heads, tiles, _ in blocks), heads * -(-count // 8))
        mixtures = [layer.routing for layer in decoder.layers if layer.routing]
        experts = max((routing.router.outputs for routing in mixtures), default=1)
        pairs = count * max((routing.chosen for routing in mixtures), default=1)
        projected = max(count * max(heads * decoder.head_dim, decoder.width), pairs * decoder.width)
        parts = len(decoder.fusion.layers) if decoder.fusion else 2 if decoder.head_input else 0
        reduced = decoder.head_input and decoder.head_input.vocab_numbers
        projected = max(projected, count * decoder.feature_width)
        gated = (layer.down.inputs * (pairs if layer.routing else count) for layer in decoder.layers)
        return [
            ((count, decoder.width), np.float32),
            ((count,), np.int32),
            ((count,), np.int32),
            ((projected,), np.float32),
            ((count, queries), np.uint16),
            ((count, queries), np.uint16),
            ((max(gated),), np.uint16),
            ((partial, partial_size(decoder)), np.float32),
            ((counters,), np.uint32),
            ((rows * round_len, decoder.width), np.float32),
            ((count, experts), np.float32),
            ((pairs,), np.int32),
            ((pairs,), np.float32),
            ((experts, count), np.int32),
            ((experts,), np.int32),
            ((max(1, count * parts * decoder.width),), np.float32),
            ((rows * round_len * decoder.head.outputs if reduced else 1,), np.float32),
        ]


def _passes(rows: int, row_tokens: int) -> Iterator[Tokens]:
    """A feed's tokens in rectangles of at most ``PASS_TOKENS``; of a row from left to right."""
    if row_tokens <= PASS_TOKENS:
        step = max(1, PASS_TOKENS // row_tokens)
        for row in range(0, rows, step):
            yield Tokens(row, min(step, rows - row), 0, row_tokens)
        return
    for row, token in itertools.product(range(rows), range(0, row_tokens, PASS_TOKENS)):
        yield Tokens(row, 1, token, min(PASS_TOKENS, row_tokens - token))


def _read(directory: Path, config: EngineConfig) -> Decoder:
    """The layers of an engine. Raises EngineDirError where they are not those of its description."""
    try:
        decoder = Decoder.model_validate_json(read_small(directory / LAYERS_NAME))
    except (OSError, ValueError, ValidationError) as error:
        raise EngineDirError(f"{directory / LAYERS_NAME}: {error}") from error
    graph, cache = config.graph, (decoder.num_kv_heads, decoder.head_dim)
    width = decoder.feature_width if decoder.fusion or decoder.head_input else None
    same = (decoder.dtype, decoder.vocab_size, width, bool(decoder.head_input)) == (
        *(graph.dtype, graph.vocab_size, graph.features.width if graph.features else None, graph.is_head),
    )
    caches = {(tensor.heads, tensor.head_dim) for tensor in graph.caches} == {cache}
    lengths = decoder.cache_length == config.build_config.cache_length and 2 * len(decoder.layers) == len(graph.caches)
    if not (same and caches and lengths):
        raise EngineDirError(f"{directory / LAYERS_NAME}: describes another engine than config.json; build it again")
    return decoder


def _load(path: Path, decoder: Decoder, device: CudaDevice) -> dict[str, DeviceArray]:
    """Copy all tensors to the GPU. Raises EngineDirError where the file is too short."""
    try:
        content = np.memmap(path, np.uint8, "r")
    except (OSError, ValueError) as error:
        raise EngineDirError(f"{path}: {error}") from error
    weights = {}
    for name, tensor in decoder.tensors.items():
        part = content[tensor.offset : tensor.offset + tensor.nbytes]
        if len(part) < tensor.nbytes:
            raise EngineDirError(f"{path}: too short for {name}; build the engine again")
        weights[name] = device.zeros(tensor.shape, tensor.dtype)
        device.write(weights[name], part.view(tensor.dtype).reshape(tensor.shape))
    return weights
