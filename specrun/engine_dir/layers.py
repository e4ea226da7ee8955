"""The layers of a decoder, in ``layers.json`` of engines that specrun's own CUDA kernels run.

A layer normalizes the residual stream and projects it to queries, keys and values, attends, and adds the projection of
that to the stream. Then it normalizes, projects to a gate and to what is gated, and adds their projected product. In a
mixture of experts each token does the latter with the weights of several experts, and adds a weighted sum.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal, get_args

import numpy as np
from pydantic import Field, model_validator

from specrun.engine_dir.config import Size, Strict
from specrun.engine_dir.dtypes import FloatName

KERNELS = "1"
"""Version of this description, and of the layout of weights."""
TILE = 16
"""Rows and columns of a tile of a weight."""
Bits = Literal[16, 8, 4]
STEPS: dict[int, int] = {16: 1, 8: 2, 4: 4}
"""Tiles of which a lane reads 16 bytes at once, by the bits of a number."""
ALIGNMENT = 256
"""Bytes; a tensor begins at a multiple of it."""
Group = Literal[16, 32]
Activation = Literal["silu", "gelu_tanh", "gpt_oss"]
"""Functions of a gate and of what it gates, as decoder.cu numbers them."""
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
TensorType = Literal["float32", "uint16", "uint8", "int32"]
"""Types of numpy: uint16 for float16 and bfloat16, uint8 for codes."""
HEAD_DIMS = tuple(range(TILE, 257, TILE))
"""Widths of a head that the kernels support."""
_MAX_EXPERTS = 1 << 12


class StoredTensor(Strict):
    """A tensor in the file of weights."""

    offset: int = Field(ge=0, multiple_of=ALIGNMENT)
    shape: tuple[Size, ...]
    dtype: TensorType

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


def place_tensors(tensors: Iterable[tuple[str, tuple[int, ...], TensorType]]) -> dict[str, StoredTensor]:
    """Where tensors of these names, shapes and types lie in the file, one behind the other."""
    places: dict[str, StoredTensor] = {}
    end = 0
    for name, shape, dtype in tensors:
        places[name] = StoredTensor(offset=end, shape=shape, dtype=dtype)
        end = -(-(end + places[name].nbytes) // ALIGNMENT) * ALIGNMENT
    return places


class Norm(Strict):
    """An RMS norm."""

    weight: str
    """Name of its factors, float32 [width]."""
    epsilon: float = Field(gt=0, lt=1)


class Linear(Strict):
    """A linear layer, or several that read one input, or a table whose rows are looked up.

    A number of its weight [outputs, inputs] has 16 bits, or is ``unit * (scale * code + offset)``. Each expert has a
    weight, one below the other.
    """

    weight: str
    """Name of its tiles: uint16 [experts * outputs / 16, inputs / 16, 256], or uint8 [.., steps, 512]."""
    inputs: Size
    outputs: Size
    experts: int = Field(default=1, ge=1, le=_MAX_EXPERTS)
    alternates: bool = False
    """Whether rows of a gate and of what is gated alternate."""
    bits: Bits = 16
    has_floats: bool = False
    """Whether codes are float8 (e4m3) or float4 (e2m1), not integers."""
    group: Group = 32
    """Columns whose codes share a scale."""
    scales: str | None = None
    """Name of the scales of codes, float16 [outputs / 16, steps, 16 * groups of a step]."""
    units: str | None = None
    """Name of the units of outputs, float32 [outputs], padded to whole tiles."""
    offsets: str | None = None
    """Name of offsets, laid out as scales."""
    bias: str | None = None
    """Name of a bias, float32 [experts * outputs]."""


class Attention(Strict):
    """Causal attention of a layer. Query heads share the keys of a head in groups."""

    window: int = Field(default=0, ge=0, le=1 << 31)
    """Number of positions that a token sees, its own included; 0: all."""
    scale: float
    softcap: float = Field(default=0, ge=0)
    """Bound of scores; 0: none."""
    rotated: int = Field(default=0, ge=0, multiple_of=2)
    """Numbers of a head that are rotated."""
    interleaved: bool = False
    """Whether neighbours are rotated together, not the two halves."""
    cos: str | None = None
    """Name of the cosines of positions, float32 [cache_length, rotated / 2]; of sines likewise."""
    sin: str | None = None
    query_norm: Norm | None = None
    """Norm of each head of queries; of keys likewise."""
    key_norm: Norm | None = None
    first_key: int = Field(default=0, ge=0, le=1 << 31)
    """Position of the first key that later tokens see."""
    sinks: str | None = None
    """Name of a score of each query head, float32 [heads], to which no value belongs."""


class Routing(Strict):
    """The choice of experts. The router reads the normalized stream, as the gates do."""

    router: Linear
    """A score for each expert."""
    chosen: int = Field(ge=1, le=_MAX_EXPERTS)
    """Number of experts of a token: those with the highest scores."""
    is_normalized: bool
    """Whether the shares of the chosen experts sum up to 1; else those of all experts do."""


class Layer(Strict):
    """One decoder layer."""

    input_norm: Norm | None
    heads: Linear
    """Queries, keys and values, one below the other."""
    attention: Attention
    output: Linear
    output_norm: Norm | None = None
    """Norm of what attention adds to the residual stream."""
    mlp_norm: Norm | None
    routing: Routing | None = None
    """None in layers without experts."""
    gate_up: Linear
    """The gate, and below it what is gated."""
    activation: Activation
    down: Linear
    down_norm: Norm | None = None
    """Norm of what the MLP adds to the residual stream."""


class Fusion(Strict):
    """The feature that a target keeps of each token for its draft head: residual streams side by side, multiplied."""

    layers: list[int] = Field(min_length=1, max_length=64)
    """Numbers of the layers whose inputs are joined; the number of layers: what the last one gives."""
    norms: list[Norm | None]
    """Norm of each."""
    norm: Norm | None = None
    """Norm of all of them together."""
    linear: Linear | None = None
    """None where the feature is one stream as it is."""


class HeadInput(Strict):
    """What a draft head reads: each token's embedding, and beside it the feature of the token before."""

    embedding_norm: Norm | None = None
    feature_norm: Norm | None = None
    linear: Linear | None = None
    """Makes the residual stream of both; None where the first layer's queries, keys and values are made of both."""
    adds_normalized: bool = False
    """Whether the residual stream begins as the normalized feature, not as the feature; only without ``linear``."""
    keeps_normalized: bool = False
    """Whether the head's own feature of a token is normalized by the last norm."""
    vocab_numbers: str | None = None
    """Name of the number of each id in the head's vocabulary, int32 [vocab_size]; from there on: it is not in it."""


class Decoder(Strict):
    """A decoder: embedding, layers, norm and head."""

    dtype: FloatName
    width: Size
    vocab_size: Size
    cache_length: Size
    num_heads: Size
    num_kv_heads: Size
    head_dim: Size
    embedding: Linear
    """The table [vocab_size, width]; it has the weight of ``head`` where they are tied."""
    embedding_scale: float = 1.0
    layers: list[Layer] = Field(min_length=1, max_length=1 << 12)
    norm: Norm | None
    head: Linear
    logits_softcap: float = Field(default=0, ge=0)
    fusion: Fusion | None = None
    """None for targets without a draft head."""
    head_input: HeadInput | None = None
    """None for other decoders than draft heads."""
    tensors: dict[str, StoredTensor]

    @model_validator(mode="after")
    def _fits_together(self) -> Decoder:
        """Every tensor has the shape that kernels read, so that none of them reads or writes beyond its memory."""
        if self.head_dim not in HEAD_DIMS or self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} heads of {self.head_dim}, {self.num_kv_heads} of keys")
        self._check_linear(self.embedding, self.width, self.vocab_size)
        queries = self.num_heads * self.head_dim
        outputs = queries + 2 * self.num_kv_heads * self.head_dim
        for number, layer in enumerate(self.layers):
            reads_both = number == 0 and self.head_input and not self.head_input.linear
            self._check_linear(layer.heads, 2 * self.width if reads_both else self.width, outputs)
            self._check_linear(layer.output, queries, self.width)
            experts = layer.routing.router.outputs if layer.routing else 1
            gated = layer.down.inputs
            if gated % TILE:
                raise ValueError(f"{gated} gated numbers are no multiple of {TILE}")
            self._check_linear(layer.gate_up, self.width, 2 * gated, experts)
            self._check_linear(layer.down, gated, self.width, experts)
            if layer.routing:
                self._check_linear(layer.routing.router, self.width, experts)
                if layer.routing.chosen > experts or layer.down_norm:
                    raise ValueError(f"{layer.routing.chosen} of {experts} experts, or a norm behind them")
            for norm in (layer.input_norm, layer.output_norm, layer.mlp_norm, layer.down_norm):
                self._check_norm(norm, self.width)
            attention = layer.attention
            for norm in (attention.query_norm, attention.key_norm):
                self._check_norm(norm, self.head_dim)
            if attention.rotated > self.head_dim or bool(attention.rotated) != bool(attention.cos and attention.sin):
                raise ValueError(f"{attention.rotated} numbers of a head are rotated")
            for name in (attention.cos, attention.sin):
                if name:
                    self._require(name, (self.cache_length, attention.rotated // 2))
            if attention.sinks:
                self._require(attention.sinks, (self.num_heads,))
        self._check_norm(self.norm, self.width)
        self._check_head_parts()
        return self

    @property
    def feature_width(self) -> int:
        """Width of the features that it writes or reads."""
        return self.fusion.linear.outputs if self.fusion and self.fusion.linear else self.width

    def _check_head_parts(self) -> None:
        """What belongs to draft heads, and the head's vocabulary."""
        numbers = self.head_input.vocab_numbers if self.head_input else None
        if numbers:
            self._require(numbers, (self.vocab_size,), "int32")
        self._check_linear(self.head, self.width, self.head.outputs if numbers else self.vocab_size)
        if part := self.head_input:
            self._check_norm(part.embedding_norm, self.width)
            self._check_norm(part.feature_norm, self.width)
            if part.linear:
                self._check_linear(part.linear, 2 * self.width, self.width)
        if fusion := self.fusion:
            joined = len(fusion.layers) * self.width
            if len(fusion.norms) != len(fusion.layers) or not all(0 <= n <= len(self.layers) for n in fusion.layers):
                raise ValueError(f"features of layers {fusion.layers} of {len(self.layers)}")
            for norm in fusion.norms:
                self._check_norm(norm, self.width)
            self._check_norm(fusion.norm, joined)
            if fusion.linear:
                self._check_linear(fusion.linear, joined, fusion.linear.outputs)
            elif len(fusion.layers) > 1 or fusion.norm:
                raise ValueError("features of several streams without a linear layer")

    def _check_linear(self, linear: Linear, inputs: int, outputs: int, experts: int = 1) -> None:
        if (linear.inputs, linear.outputs, linear.experts) != (inputs, outputs, experts):
            shape = f"{linear.inputs} -> {linear.outputs}, {linear.experts} times"
            raise ValueError(f"{linear.weight}: {shape}, expected {inputs} -> {outputs}, {experts} times")
        rows, step = experts * -(-outputs // TILE), TILE * STEPS[linear.bits]
        if inputs % TILE:
            raise ValueError(f"{linear.weight}: {inputs} inputs are no multiple of {TILE}")
        steps = -(-inputs // step)
        if linear.bits == 16:
            self._require(linear.weight, (rows, steps, TILE * TILE), "uint16")
        else:
            self._require(linear.weight, (rows, steps, 2 * TILE * TILE), "uint8")
            for name in (linear.scales, linear.offsets) if linear.offsets else (linear.scales,):
                self._require(str(name), (rows, steps, TILE * step // linear.group), "uint16")
            self._require(str(linear.units), (rows * TILE,))
        if linear.bias:
            self._require(linear.bias, (experts * outputs,))

    def _check_norm(self, norm: Norm | None, width: int) -> None:
        if norm:
            self._require(norm.weight, (width,))

    def _require(self, name: str, shape: tuple[int, ...], dtype: str = "float32") -> None:
        tensor = self.tensors.get(name)
        if tensor is None or tensor.shape != shape or tensor.dtype != dtype:
            raise ValueError(f"{name}: expected {dtype} {list(shape)}")
