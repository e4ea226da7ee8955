"""Compiles a checkpoint for specrun's own CUDA kernels. It needs no GPU: specrun compiles the kernels where they run.

The passes for CPU engines turn the graph into a few operators. ``layers.json`` describes its layers, and its weights
are written in the layout of tensor cores.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass
from pydantic import ValidationError

from specbuild.compilers import Compiled
from specbuild.compilers.cpu.attention import fuse_cached_attention
from specbuild.compilers.cpu.experts import use_chosen_experts
from specbuild.compilers.cpu.fusions import fuse_into_products
from specbuild.compilers.cpu.products import use_own_products
from specbuild.compilers.cpu.wanted import take_wanted_tokens_first
from specbuild.compilers.cuda.heads import begin_head, read_fusion, read_head_output
from specbuild.compilers.cuda.layers import read_embedding, read_head, read_layers
from specbuild.compilers.cuda.nodes import UnsupportedLayerError
from specbuild.compilers.cuda.tensors import Tensors
from specbuild.compilers.cuda.tiles import UnsupportedWeightError, pack_for_gpu
from specbuild.compilers.graph_io import describe_io
from specbuild.graph import ops as graphs
from specrun.engine_dir.config import (
    GRAPH_NAME,
    LAYER_WEIGHTS_NAME,
    LAYERS_NAME,
    BackendInfo,
    BuildConfig,
    GraphInfo,
)
from specrun.engine_dir.layers import KERNELS, Decoder, StoredTensor, place_tensors
from specrun.errors import BuildError

_DTYPES = {"float16": ir.DataType.FLOAT16, "bfloat16": ir.DataType.BFLOAT16}
_ADVICE = "build with --backend tensorrt, or --backend onnxruntime --device cuda"


def compile_layers(
    checkpoint: Path, graph: GraphInfo, build: BuildConfig, output: Path, advance: Callable[[float], None]
) -> Compiled:
    """The ``Compiler`` for specrun's own CUDA kernels: write the layers of a decoder and its weights."""
    if graph.dtype not in _DTYPES:
        raise BuildError(
            f"{checkpoint}: tensor cores multiply 16-bit numbers; convert with --dtype bfloat16 or float16"
        )
    if graph.kv_cache_dtype:
        raise BuildError(f"{checkpoint}: --backend cuda has no caches in few bits yet; {_ADVICE}")
    if graph.states or graph.parallel_drafts:
        raise BuildError(f"{checkpoint}: --backend cuda runs no recurrent layers and no heads of blocks; {_ADVICE}")
    model = ir.load(checkpoint / GRAPH_NAME)
    io = describe_io(model)
    try:
        decoder, tensors = _read(model, graph, build)
    except (UnsupportedLayerError, UnsupportedWeightError, ValidationError) as error:
        reason = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise BuildError(f"{checkpoint}: --backend cuda cannot run this model: {reason}; {_ADVICE}") from error
    advance(0.1)
    with (output / LAYER_WEIGHTS_NAME).open("wb") as file:
        for stored, numbers in _in_order(decoder, tensors):
            file.write(bytes(stored.offset - file.tell()))
            numbers.tofile(file)
            advance(0.9 / len(decoder.tensors))
    (output / LAYERS_NAME).write_text(decoder.model_dump_json(indent=1, exclude_defaults=True), encoding="utf-8")
    return Compiled(
        backend=BackendInfo(name="cuda", version=KERNELS, device="cuda", machine=platform.machine(), capturable=True),
        graph=graph,
        io=io,
        files=[LAYERS_NAME, LAYER_WEIGHTS_NAME],
        notes=[f"{len(decoder.layers)} layers for specrun's own kernels, compiled on the GPU when it is loaded"],
    )


def _read(model: ir.Model, graph: GraphInfo, build: BuildConfig) -> tuple[Decoder, Tensors]:
    """Rewrite a graph. Returns its layers and their tensors. Raises UnsupportedLayerError and ValidationError."""
    dtype = _DTYPES[graph.dtype]
    graphs.widen_to_float32(model)
    graphs.drop_activation_rounding(model)
    use_chosen_experts(model)
    take_wanted_tokens_first(model)
    use_own_products(model, pack_for_gpu(dtype))
    RemoveUnusedNodesPass()(model)
    fuse_into_products(model)
    fuse_cached_attention(model, build.cache_length)
    tensors = Tensors()
    embedding = read_embedding(model.graph, tensors, dtype)
    start, head_input, softcap, fusion = embedding.stream, None, 0.0, None
    reads = start
    if graph.is_head:
        head_input, start, reads = begin_head(model.graph, start, tensors)
    layers, streams = read_layers(model.graph, start, reads, graph.layers, tensors)
    if head_input:
        norm, head, head_input = read_head_output(model.graph, streams[-1], head_input, tensors)
    else:
        norm, head, softcap = read_head(model.graph, streams[-1], tensors)
        fusion = read_fusion(model.graph, streams, tensors) if graph.features else None
    caches = graph.caches
    if len({(cache.heads, cache.head_dim) for cache in caches}) > 1:
        raise UnsupportedLayerError("heads of keys and values, or of layers, that differ in shape")
    decoder = Decoder(
        dtype=graph.dtype,
        width=embedding.table.inputs,
        vocab_size=graph.vocab_size,
        cache_length=build.cache_length,
        num_heads=layers[0].heads.outputs // caches[0].head_dim - 2 * caches[0].heads,
        num_kv_heads=caches[0].heads,
        head_dim=caches[0].head_dim,
        embedding=embedding.table,
        embedding_scale=embedding.scale,
        layers=layers,
        norm=norm,
        head=head,
        logits_softcap=softcap,
        fusion=fusion,
        head_input=head_input,
        tensors=place_tensors(tensors.described()),
    )
    return decoder, tensors


def _in_order(decoder: Decoder, tensors: Tensors) -> Iterator[tuple[StoredTensor, npt.NDArray[Any]]]:
    """All tensors in file order. Each weight is computed when it is yielded."""
    for name, stored in decoder.tensors.items():
        yield stored, np.ascontiguousarray(tensors.content(name), stored.dtype)
