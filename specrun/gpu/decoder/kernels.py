"""Queues the kernels of this folder's files: a method for each, in the order of a forward pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specrun.devices import DeviceArray, Grid
from specrun.devices.cuda import CudaDevice
from specrun.engine_dir.layers import (
    ACTIVATIONS,
    TILE,
    Attention,
    Decoder,
    Fusion,
    HeadInput,
    Layer,
    Linear,
    Norm,
    Routing,
)
from specrun.gpu.backend import Feed
from specrun.gpu.decoder.source import BLOCK_TOKENS, FEW_TOKENS, Formats, format_of, source, threads

CHUNK = 128
"""Positions of a block of attention."""
_QUERIES = 16
_SPREAD = 32
"""Blocks that share the logits of a token."""
_NONE = DeviceArray(0, (0,), np.dtype(np.float32))


@dataclass(frozen=True)
class Tokens:
    """The tokens of a pass: a rectangle of a feed's."""

    first_row: int
    rows: int
    first_token: int
    row_tokens: int

    @property
    def count(self) -> int:
        """Number of tokens."""
        return self.rows * self.row_tokens


@dataclass(frozen=True)
class Buffers:
    """Memory between kernels. ``tokens`` is at least the tokens of a pass."""

    stream: DeviceArray
    """[tokens, width] float32: the residual stream"""
    rows: DeviceArray
    """[tokens] int32: rows of the cache"""
    positions: DeviceArray
    """[tokens] int32"""
    projected: DeviceArray
    """[tokens, outputs] or [pairs, outputs] float32"""
    queries: DeviceArray
    """[tokens, heads, head_dim] in 16 bits"""
    attended: DeviceArray
    """[tokens, heads, head_dim] in 16 bits"""
    gated: DeviceArray
    """[tokens, inputs of down] in 16 bits; [pairs, ..] of pairs of a token and an expert"""
    partial: DeviceArray
    """float32: parts of attention"""
    counters: DeviceArray
    """uint32, zeros"""
    wanted: DeviceArray
    """[B * K, width] float32: the stream of tokens whose logits are wanted"""
    scores: DeviceArray
    """[tokens, experts] float32"""
    choices: DeviceArray
    """[pairs] int32: experts"""
    shares: DeviceArray
    """[pairs] float32"""
    lists: DeviceArray
    """[experts, tokens] int32: pairs of each expert"""
    counts: DeviceArray
    """[experts] int32: number of pairs of each expert"""
    joined: DeviceArray
    """[tokens, parts * width] float32: streams, or embeddings and features, side by side"""
    head_logits: DeviceArray
    """[B * K, outputs] float32: logits of a head's own vocabulary"""


class DecoderKernels:
    """Queues the kernels of a decoder, on its weights and buffers."""

    def __init__(self, device: CudaDevice, decoder: Decoder, weights: dict[str, DeviceArray]) -> None:
        """Compile them. weights: the decoder's tensors by name. Raises BackendError."""
        self._device, self._decoder = device, decoder
        self.weights = weights
        self.buffers: Buffers
        """Memory between kernels; set before the first launch."""
        formats = Formats.of(decoder)
        self._prefix = f"{decoder.dtype}, heads of {decoder.head_dim}: "  # Two engines of a device may differ.
        device.add_kernels(source(decoder.dtype, decoder.head_dim, formats), threads(formats), prefix=self._prefix)

    def begin(self, tokens: Tokens, feed: Feed, first_cache_row: int) -> None:
        """Look up the embeddings of ``tokens``, and their rows and positions in the cache."""
        decoder, buffers = self._decoder, self.buffers
        self._launch(
            f"begin_{format_of(decoder.embedding)}",
            (tokens.count, 1, 1),
            *self._weight(decoder.embedding),
            *(feed.input_ids, feed.input_ids.shape[1], feed.write_indices),
            *(tokens.first_row, tokens.first_token, tokens.row_tokens, first_cache_row),
            *(decoder.vocab_size, decoder.width, _bits(decoder.embedding_scale)),
            *(buffers.stream, buffers.rows, buffers.positions),
        )

    def project_heads(
        self, tokens: Tokens, layer: Layer, x: DeviceArray, keys: DeviceArray, values: DeviceArray
    ) -> None:
        """Project ``x``, mostly the stream, to queries, and to keys and values in their caches; normalize it first."""
        decoder, buffers, attention = self._decoder, self.buffers, layer.attention
        head_norm = attention.query_norm or attention.key_norm
        query_gamma, key_gamma = (
            self._tensor(norm.weight if norm else None) for norm in (attention.query_norm, attention.key_norm)
        )
        self._product(
            "heads",
            layer.heads,
            layer.heads.outputs,
            tokens.count,
            *(self._tensor(layer.heads.bias), x, *self._norm(layer.input_norm)),
            *(layer.heads.inputs, tokens.count, decoder.num_heads, decoder.num_kv_heads),
            *(query_gamma, key_gamma, _bits(head_norm.epsilon if head_norm else 0)),
            *(self._tensor(attention.cos), self._tensor(attention.sin), attention.rotated, int(attention.interleaved)),
            *(buffers.rows, buffers.positions, decoder.cache_length, buffers.projected, buffers.counters),
            *(buffers.queries, keys, values),
        )

    def attend(self, tokens: Tokens, attention: Attention, keys: DeviceArray, values: DeviceArray) -> None:
        """Attend to a layer's keys and values."""
        decoder, buffers = self._decoder, self.buffers
        tiles, chunks = attention_blocks(decoder, tokens)
        self._launch(
            "attention",
            (decoder.num_kv_heads * tiles, tokens.rows, chunks),
            *(buffers.queries, keys, values, buffers.rows, buffers.positions, tokens.row_tokens),
            *(decoder.num_heads, decoder.num_kv_heads, decoder.cache_length, attention.window, attention.first_key),
            *(_bits(attention.scale), _bits(attention.softcap), self._tensor(attention.sinks)),
            *(buffers.partial, buffers.counters, buffers.attended),
        )

    def add_projected(self, inputs: DeviceArray, count: int, linear: Linear, norm: Norm | None) -> None:
        """Add the projection of ``inputs``, then normalized if there is a ``norm``, to the stream."""
        buffers = self.buffers
        residual, to = (_NONE, buffers.projected) if norm else (buffers.stream, buffers.stream)
        sizes = (linear.inputs, count, linear.outputs)
        self._product("added", linear, linear.outputs, count, self._tensor(linear.bias), inputs, *sizes, residual, to)
        if norm:
            arguments = (buffers.projected, *self._norm(norm), linear.outputs, buffers.stream)
            self._launch("add_normalized", (count, 1, 1), *arguments)

    def project_gated(self, count: int, layer: Layer) -> None:
        """Project the normalized stream to the gated numbers of an MLP."""
        linear, buffers = layer.gate_up, self.buffers
        outputs = linear.outputs // 2
        sizes = (linear.inputs, count, outputs, ACTIVATIONS.index(layer.activation))
        self._product(
            "gated", linear, outputs, count, buffers.stream, *self._norm(layer.mlp_norm), *sizes, buffers.gated
        )

    def choose_experts(self, count: int, layer: Layer, routing: Routing) -> None:
        """Choose the experts of each token by the normalized stream, and list the pairs of each expert."""
        buffers, router = self.buffers, routing.router
        self._project(count, router, buffers.stream, layer.mlp_norm, buffers.scores)
        chosen = (router.outputs, routing.chosen, int(routing.is_normalized))
        self._launch("choose_experts", (count, 1, 1), buffers.scores, *chosen, buffers.choices, buffers.shares)
        lists = (buffers.choices, count, routing.chosen, buffers.lists, buffers.counts)
        self._launch("list_pairs", (router.outputs, 1, 1), *lists)

    def add_experts(self, count: int, layer: Layer, routing: Routing) -> None:
        """Add the weighted sum of the chosen experts' MLPs to the stream."""
        buffers, gate_up, down = self.buffers, layer.gate_up, layer.down
        outputs = gate_up.outputs // 2
        sizes = (gate_up.inputs, count, outputs, ACTIVATIONS.index(layer.activation), int(gate_up.alternates))
        of_experts = (buffers.lists, buffers.counts)
        self._product(
            "gated_pairs",
            gate_up,
            outputs,
            count,
            *(self._tensor(gate_up.bias), buffers.stream, *self._norm(layer.mlp_norm), *sizes),
            *(routing.chosen, *of_experts, buffers.gated),
        )
        self._product(
            "pairs",
            down,
            down.outputs,
            count,
            *(self._tensor(down.bias), buffers.gated, down.inputs, count, down.outputs),
            *(*of_experts, buffers.projected),
        )
        summed = (buffers.projected, buffers.shares, routing.chosen, down.outputs, buffers.stream)
        self._launch("add_pairs", (count, 1, 1), *summed)

    def keep_wanted(self, tokens: Tokens, feed: Feed) -> None:
        """Keep the stream of those of ``tokens`` whose logits are wanted."""
        buffers, (batch, num_logits) = self.buffers, feed.logits_indices.shape
        self._launch(
            "keep_wanted",
            (batch * num_logits, 1, 1),
            *(buffers.stream, feed.logits_indices, num_logits),
            *(tokens.first_row, tokens.rows, tokens.first_token, tokens.row_tokens),
            *(self._decoder.width, buffers.wanted),
        )

    def project_logits(self, count: int, logits: DeviceArray) -> None:
        """Compute the logits [count, vocab_size] of the kept tokens."""
        decoder, head = self._decoder, self._decoder.head
        numbers = decoder.head_input.vocab_numbers if decoder.head_input else None
        to = self.buffers.head_logits if numbers else logits
        self._project(count, head, self.buffers.wanted, decoder.norm, to, decoder.logits_softcap)
        if numbers:
            sizes = (head.outputs, decoder.vocab_size)
            self._launch("spread_logits", (count, _SPREAD, 1), to, self._tensor(numbers), *sizes, logits)

    def join_state(self, count: int, fusion: Fusion, layer: int) -> None:
        """Keep the stream in front of ``layer`` for the features, wherever it is a part of them."""
        for part, number in enumerate(fusion.layers):
            if number == layer:
                self._join(count, self.buffers.stream, fusion.norms[part], len(fusion.layers), part)

    def write_features(self, count: int, fusion: Fusion, features: DeviceArray) -> None:
        """Write the features of a pass to their cache."""
        buffers, joined = self.buffers, self.buffers.joined
        if fusion.linear:
            self._project(count, fusion.linear, joined, fusion.norm, buffers.projected)
            joined = buffers.projected
        places = (buffers.rows, buffers.positions, self._decoder.cache_length, self._decoder.feature_width)
        self._launch("write_features", (count, 1, 1), joined, *places, features)

    def begin_head(self, count: int, part: HeadInput, features: DeviceArray) -> None:
        """Join the embeddings of tokens and the features before them; begin the residual stream."""
        buffers, width = self.buffers, self._decoder.width
        self._join(count, buffers.stream, part.embedding_norm, 2, 0)
        places = (buffers.rows, buffers.positions, self._decoder.cache_length, width)
        self._launch("read_features", (count, 1, 1), features, *places, buffers.stream)
        self._join(count, buffers.stream, part.feature_norm, 2, 1)
        if part.linear:
            self._project(count, part.linear, buffers.joined, None, buffers.stream)
        elif part.adds_normalized:
            in_place = (*self._norm(part.feature_norm), width, width, 0, buffers.stream)
            self._launch("join_stream", (count, 1, 1), buffers.stream, *in_place)

    def keep_features(self, feed: Feed, first_cache_row: int, part: HeadInput, features: DeviceArray) -> None:
        """Write the head's own feature of the first wanted token of each row."""
        decoder, buffers, (batch, num_logits) = self._decoder, self.buffers, feed.logits_indices.shape
        norm = self._norm(decoder.norm if part.keeps_normalized else None)
        places = (feed.logits_indices, num_logits, feed.write_indices, first_cache_row)
        sizes = (decoder.cache_length, decoder.width)
        self._launch("keep_features", (batch, 1, 1), buffers.wanted, *places, *norm, *sizes, features)

    def _join(self, count: int, stream: DeviceArray, norm: Norm | None, parts: int, part: int) -> None:
        width = self._decoder.width
        sizes = (width, parts * width, part * width)
        self._launch("join_stream", (count, 1, 1), stream, *self._norm(norm), *sizes, self.buffers.joined)

    def _project(
        self, count: int, linear: Linear, x: DeviceArray, norm: Norm | None, to: DeviceArray, softcap: float = 0
    ) -> None:
        """Multiply tokens in float32, perhaps normalized, and keep sums in float32."""
        arguments = (self._tensor(linear.bias), x, *self._norm(norm), linear.inputs, count, linear.outputs)
        self._product("logits", linear, linear.outputs, count, *arguments, _bits(softcap), to)

    def _product(self, name: str, linear: Linear, outputs: int, count: int, *arguments: DeviceArray | int) -> None:
        block = FEW_TOKENS if count <= FEW_TOKENS else BLOCK_TOKENS
        grid = (-(-outputs // TILE), -(-count // block), linear.experts)
        self._launch(f"{name}_{block}_{format_of(linear)}", grid, *self._weight(linear), *arguments)

    def _launch(self, name: str, grid: Grid, *arguments: DeviceArray | int) -> None:
        self._device.launch(self._prefix + name, grid, *arguments)

    def _weight(self, linear: Linear) -> tuple[DeviceArray, ...]:
        names = (linear.weight, linear.scales, linear.units, linear.offsets)
        return tuple(self._tensor(name) for name in names)

    def _tensor(self, name: str | None) -> DeviceArray:
        return self.weights[name] if name else _NONE

    def _norm(self, norm: Norm | None) -> tuple[DeviceArray, int]:
        return (self.weights[norm.weight], _bits(norm.epsilon)) if norm else (_NONE, 0)


def attention_blocks(decoder: Decoder, tokens: Tokens) -> tuple[int, int]:
    """Numbers of blocks of a key-value head along its queries and along positions. Prompts have 1 along positions."""
    tiles = -(-tokens.row_tokens * (decoder.num_heads // decoder.num_kv_heads) // _QUERIES)
    return tiles, -(-decoder.cache_length // CHUNK) if tokens.row_tokens <= BLOCK_TOKENS else 1


def partial_size(decoder: Decoder) -> int:
    """Count of float32 numbers of a block's part of attention: see ``Attended`` in decoder.cu."""
    return 32 * (decoder.head_dim // 2 + 4)


def _bits(value: float) -> int:
    """The bits of a float32 as an integer: arguments of kernels are 32-bit integers."""
    return int(np.float32(value).view(np.int32))
