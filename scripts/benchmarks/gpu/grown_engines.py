"""The measured pair as engines of our own kernels, written without a checkpoint and without ONNX on the way.

The small trained pair is grown in memory, and each weight goes from there into the file of an engine, in its layout.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from scripts.benchmarks.gpu.decoders import cache_length_of, describe_decoder, describe_engine
from scripts.benchmarks.gpu.results import Results
from scripts.benchmarks.gpu.sizes import Shape, Size
from scripts.grow_checkpoint import grown_in_memory
from specbuild.compilers.cuda.tiles import pack_tiles
from specrun.engine_dir.config import (
    CONFIG_NAME,
    LAYER_WEIGHTS_NAME,
    LAYERS_NAME,
    EngineConfig,
    describe_file,
)
from specrun.engine_dir.directories import new_directory
from specrun.engine_dir.layers import Decoder, StoredTensor
from specrun.text.tokenizer import describe_tokenizer, tokenizer_files


@dataclass(frozen=True)
class GrownModel:
    """A grown model, and its engine's description."""

    source: Path
    """Checkpoint that it was grown from: its tokenizer stays."""
    model: Any
    decoder: Decoder
    config: EngineConfig


def grow_for_engine(source: Path, options: str, size: Size, max_draft_len: int) -> GrownModel:
    """The model of ``source`` with the sizes in ``options`` of scripts/grow_checkpoint.py."""
    model = grown_in_memory(source, [*options.split(), "--dtype", "float16"])
    config = model.config
    shape = Shape(
        layers=config.num_hidden_layers,
        width=config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        gated=config.intermediate_size,
        vocab_size=config.vocab_size,
    )
    decoder = describe_decoder(shape, cache_length_of(size.max_seq_len, max_draft_len), config.rms_norm_eps)
    described = describe_engine(decoder, size, size.batches[-1], size.max_seq_len, max_draft_len)
    return GrownModel(source, model, decoder, described)


def write_grown_engine(results: Results, grown: GrownModel, directory: Path, rows: int) -> None:
    """The engine directory of a grown model, for so many rows."""
    began, config = time.perf_counter(), grown.config
    with new_directory(directory, force=False) as work:
        _write_weights(work / LAYER_WEIGHTS_NAME, grown)
        (work / LAYERS_NAME).write_text(grown.decoder.model_dump_json(exclude_defaults=True))
        copied = tokenizer_files(grown.source)
        for name in copied:
            shutil.copyfile(grown.source / name, work / name)
        files = (LAYERS_NAME, LAYER_WEIGHTS_NAME, *copied)
        written = {
            "build_config": config.build_config.model_copy(update={"max_batch_size": rows}),
            "tokenizer": describe_tokenizer(work),
            "pretrained_config": grown.model.config.to_dict(),
            "files": {name: describe_file(work / name) for name in files},
            "modified": {name: (work / name).stat().st_mtime_ns for name in files},
        }
        (work / CONFIG_NAME).write_text(config.model_copy(update=written).model_dump_json() + "\n")
    results.put(written_in_seconds=time.perf_counter() - began)


def _write_weights(path: Path, grown: GrownModel) -> None:
    """Each tensor in its place, as many at once as there are processors: numpy copies without Python's lock."""
    tensors = grown.decoder.tensors
    end = max(stored.offset + stored.nbytes for stored in tensors.values())
    content = np.memmap(path, np.uint8, "w+", shape=(end,))

    def write(stored: StoredTensor, parts: list[Any]) -> None:
        content[stored.offset :][: stored.nbytes] = _laid_out(parts, stored).view(np.uint8).ravel()

    with ThreadPoolExecutor(os.cpu_count()) as threads:
        for done in [threads.submit(write, tensors[name], parts) for name, parts in _weights(grown)]:
            done.result()
    content.flush()


def _weights(grown: GrownModel) -> Iterator[tuple[str, list[Any]]]:
    """The tensors of each of the decoder's, one below the other: torch's, or numpy's that need no layout."""
    model, decoder = grown.model.model, grown.decoder
    for number, layer in enumerate(model.layers):
        attention, mlp = layer.self_attn, layer.mlp
        yield f"{number}.input_norm", [layer.input_layernorm.weight]
        yield f"{number}.heads", [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
        yield f"{number}.output", [attention.o_proj.weight]
        yield f"{number}.mlp_norm", [layer.post_attention_layernorm.weight]
        yield f"{number}.gate_up", [mlp.gate_proj.weight, mlp.up_proj.weight]
        yield f"{number}.down", [mlp.down_proj.weight]
    yield "norm", [model.norm.weight]
    yield "head", [grown.model.get_output_embeddings().weight]
    frequencies = model.rotary_emb.inv_freq.double().numpy()
    angles = np.arange(decoder.cache_length)[:, None] * frequencies
    yield "cos", [np.cos(angles)]
    yield "sin", [np.sin(angles)]


def _laid_out(parts: list[Any], stored: StoredTensor) -> npt.NDArray[Any]:
    """Tensors as they are stored: vectors in float32, matrices in tiles."""
    arrays = [part if isinstance(part, np.ndarray) else part.detach().numpy() for part in parts]
    if stored.dtype == "float32":
        return np.ascontiguousarray(np.concatenate(arrays), np.float32)
    tiles = [pack_tiles(array.view(np.uint16), lambda bits: bits) for array in arrays]
    return np.concatenate(tiles)
