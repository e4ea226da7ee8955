"""The kernels in ``decoder.cu`` and ``experts.cu``. A method queues each, in the order of a forward pass."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from importlib import resources
from typing import NamedTuple

import numpy as np

from specrun.devices import DeviceArray, Grid
from specrun.devices.cuda import CudaDevice
from specrun.engine_dir.layers import ACTIVATIONS, TILE, Attention, Decoder, Layer, Linear, Norm, Routing
from specrun.gpu.backend import Feed

CHUNK = 128
"""Positions of a block of attention."""
_QUERIES = 16
_BLOCK_TOKENS = 32
_FEW_TOKENS = 8
_BLOCKS = (_FEW_TOKENS, _BLOCK_TOKENS)
_NONE = DeviceArray(0, (0,), np.dtype(np.float32))

_PRODUCTS = ("heads", "gated", "added", "logits")
_EXPERT_PRODUCTS = ("gated_pairs", "pairs")


class Formats(NamedTuple):
    """Formats of a decoder's weights, by what reads them."""

    products: Collection[str]
    tables: Collection[str]
    experts: Collection[str] = ()

    @classmethod
    def of(cls, decoder: Decoder) -> Formats:
        """Those of a decoder."""
        products, experts = {format_of(decoder.head)}, set[str]()
        for layer in decoder.layers:
            products |= {format_of(layer.heads), format_of(layer.output)}
            (experts if layer.routing else products).update(map(format_of, (layer.gate_up, layer.down)))
            products |= {format_of(layer.routing.router)} if layer.routing else set()
        return cls(sorted(products), [format_of(decoder.embedding)], sorted(experts))


def threads(formats: Formats) -> dict[str, int]:
    """Threads per block of each kernel."""
    by_product = [(_PRODUCTS, formats.products), (_EXPERT_PRODUCTS, formats.experts)]
    kinds = [(f"{name}_{tokens}", forms) for names, forms in by_product for name in names for tokens in _BLOCKS]
    experts = {"choose_experts": 32, "list_pairs": 32, "add_pairs": 128} if formats.experts else {}
    return {
        **{f"{kind}_{form}": 256 for kind, forms in kinds for form in forms},
        **{f"begin_{form}": 128 for form in formats.tables},
        **dict.fromkeys(("attention", "add_normalized", "keep_wanted"), 128),
        **experts,
    }


def source(dtype: str, head_dim: int, formats: Formats) -> str:
    """The kernels' text, between what is constant in an engine and the formats of its weights."""
    lines = [f"#define HEAD_DIM {head_dim}", f"#define BFLOAT16 {int(dtype == 'bfloat16')}"]
    for name in ("decoder.cu", "experts.cu") if formats.experts else ("decoder.cu",):
        lines += [f'#line 1 "{name}"', (resources.files(__package__) / name).read_text(encoding="utf-8")]
    names = sorted({*formats.products, *formats.tables, *formats.experts})
    lines += [f"using Weight_{form} = Weight<{form.replace('_', ', ')}>;" for form in names]
    for macro, forms in zip(("PRODUCTS", "EMBEDDING", "EXPERTS"), formats, strict=True):
        lines += [f"{macro}({form})" for form in forms]
    return "\n".join([*lines, ""])


def format_of(linear: Linear) -> str:
    """The format of a weight in names of kernels: the parameters of ``Weight`` in decoder.cu."""
    tiles = linear.group // TILE if linear.bits < 16 else 1
    return f"{linear.bits}_{tiles}_{int(linear.offsets is not None)}_{int(linear.has_floats)}"


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

    def project_heads(self, tokens: Tokens, layer: Layer, keys: DeviceArray, values: DeviceArray) -> None:
        """Project the normalized stream to queries, and to keys and values in their caches."""
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
            *(self._tensor(layer.heads.bias), buffers.stream, *self._norm(layer.input_norm)),
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
            *(decoder.num_heads, decoder.num_kv_heads, decoder.cache_length, attention.window),
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
        arguments = (buffers.stream, *self._norm(layer.mlp_norm), router.inputs, count, router.outputs)
        self._product("logits", router, router.outputs, count, *arguments, _bits(0), buffers.scores)
        chosen = (router.outputs, routing.chosen, int(routing.is_normalized))
        self._launch(
            "choose_experts",
            (count, 1, 1),
            *(buffers.scores, self._tensor(router.bias), *chosen, buffers.choices, buffers.shares),
        )
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
        arguments = (self.buffers.wanted, *self._norm(decoder.norm), head.inputs, count, head.outputs)
        self._product("logits", head, head.outputs, count, *arguments, _bits(decoder.logits_softcap), logits)

    def _product(self, name: str, linear: Linear, outputs: int, count: int, *arguments: DeviceArray | int) -> None:
        block = _FEW_TOKENS if count <= _FEW_TOKENS else _BLOCK_TOKENS
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
    return tiles, -(-decoder.cache_length // CHUNK) if tokens.row_tokens <= _BLOCK_TOKENS else 1


def partial_size(decoder: Decoder) -> int:
    """Count of float32 numbers of a block's part of attention: see ``Attended`` in decoder.cu."""
    return 32 * (decoder.head_dim // 2 + 4)


def _bits(value: float) -> int:
    """The bits of a float32 as an integer: arguments of kernels are 32-bit integers."""
    return int(np.float32(value).view(np.int32))
