"""Descriptions of dense decoders for our own kernels, which are written without a checkpoint."""

from __future__ import annotations

import math

from scripts.benchmarks.gpu.sizes import Shape, Size
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
from specrun.engine_dir.layers import KERNELS, TILE, Attention, Decoder, Layer, Linear, Norm, TensorType, place_tensors


def describe_decoder(shape: Shape, cache_length: int, epsilon: float = 1e-5) -> Decoder:
    """A Llama in float16 with tied embeddings.

    Every layer has weights of its own, as a GPU's cache would hold shared ones.
    """
    tensors: list[tuple[str, tuple[int, ...], TensorType]] = []

    def vector(name: str, *sizes: int) -> str:
        tensors.append((name, sizes, "float32"))
        return name

    def norm(name: str) -> Norm:
        return Norm(weight=vector(name, shape.width), epsilon=epsilon)

    def linear(name: str, outputs: int, inputs: int) -> Linear:
        tensors.append((name, (-(-outputs // TILE), inputs // TILE, TILE * TILE), "uint16"))
        return Linear(weight=name, inputs=inputs, outputs=outputs)

    queries = shape.heads * shape.head_dim
    cos, sin = (vector(name, cache_length, shape.head_dim // 2) for name in ("cos", "sin"))
    attention = Attention(scale=1 / math.sqrt(shape.head_dim), rotated=shape.head_dim, cos=cos, sin=sin)
    layers = [
        Layer(
            input_norm=norm(f"{number}.input_norm"),
            heads=linear(f"{number}.heads", queries + 2 * shape.kv_heads * shape.head_dim, shape.width),
            attention=attention,
            output=linear(f"{number}.output", shape.width, queries),
            mlp_norm=norm(f"{number}.mlp_norm"),
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
        cache_length=cache_length,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        embedding=head,
        layers=layers,
        norm=norm("norm"),
        head=head,
        tensors=place_tensors(tensors),
    )


def cache_length_of(max_seq_len: int, max_draft_len: int) -> int:
    """Positions of a row in the cache."""
    return -(-(max_seq_len + max_draft_len + 1) // 8) * 8


def describe_engine(decoder: Decoder, size: Size, rows: int, max_seq_len: int, max_draft_len: int) -> EngineConfig:
    """The engine's config, without a tokenizer, and without the checksums of its files."""
    caches = [CacheTensor(heads=decoder.num_kv_heads, head_dim=decoder.head_dim)] * (2 * len(decoder.layers))
    weights, unknown = sum(tensor.nbytes for tensor in decoder.tensors.values()), "0" * 64
    return EngineConfig(
        backend=BackendInfo(name="cuda", version=KERNELS, device="cuda", machine="", capturable=True),
        build_config=BuildConfig(
            max_batch_size=rows,
            max_input_len=min(size.max_input_len, max_seq_len - 1),
            max_seq_len=max_seq_len,
            max_draft_len=max_draft_len,
            speculative_decoding_mode="draft_tokens_external" if max_draft_len else "none",
            gather_generation_logits=False,
            cache_length=decoder.cache_length,
            profiles=[],
        ),
        graph=GraphInfo(vocab_size=decoder.vocab_size, dtype=decoder.dtype, caches=caches),
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
