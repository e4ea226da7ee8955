"""Engines for our own CUDA kernels: which models have such layers, what others are told, and how weights lie."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from specbuild.compilers.cuda.tiles import tile_layout
from specrun.engine_dir.config import LAYER_WEIGHTS_NAME, LAYERS_NAME, open_engine
from specrun.engine_dir.layers import Decoder
from specrun.errors import BackendError, BuildError
from tests.helpers.engines import make_engine, make_onnx
from tests.helpers.families import save_checkpoint


def build(root: Path, family: str, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Path:
    onnx = make_onnx(save_checkpoint(root / "hf", family, dtype=dtype), root / "onnx", verify=False, **options)
    return make_engine(onnx, root / "engine", backend="cuda", max_draft_len=3)


def test_the_layers_are_described_beside_their_weights(tmp_path: Path) -> None:
    engine = build(tmp_path, "gemma3")
    decoder = Decoder.model_validate_json((engine / LAYERS_NAME).read_text())
    assert [layer.attention.window for layer in decoder.layers] == [6, 6, 0]
    assert decoder.embedding == decoder.head.weight, "tied embeddings are stored once"
    assert decoder.embedding_scale == 8 and decoder.layers[0].activation == "gelu_tanh"
    assert all(layer.output_norm and layer.attention.query_norm for layer in decoder.layers)
    end = max(tensor.offset + tensor.nbytes for tensor in decoder.tensors.values())
    assert (engine / LAYER_WEIGHTS_NAME).stat().st_size == end
    config = open_engine(engine)
    assert config.backend.name == "cuda" and config.is_batch_invariant and config.writes_cache


@pytest.mark.parametrize(
    ("family", "says"),
    [
        ("olmo2", "layer 0: queries or keys with a norm over all heads"),
        ("opt", "token ids are looked up in several tables"),
        ("gpt_neox", "layer 0: attention that the kernels do not compute"),
        ("mixtral", "layer 0: an MLP without a gate"),
        ("gpt_oss", "layer 0: attention sinks"),
        ("lfm2", "runs dense decoders, without a draft head"),
        ("deepseek_v2", "layer 0: attention that the kernels do not compute"),
    ],
)
def test_other_models_are_told_which_layer_is_in_the_way(tmp_path: Path, family: str, says: str) -> None:
    with pytest.raises(BuildError, match=f"{says}.*build with --backend tensorrt"):
        build(tmp_path, family)
    assert not (tmp_path / "engine").exists()


def test_numbers_of_other_kinds_are_told_how_to_convert(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="convert with --dtype bfloat16 or float16"):
        build(tmp_path / "float32", "llama3", torch.float32)
    with pytest.raises(BuildError, match="no weights or caches in few bits yet"):
        build(tmp_path / "int4", "llama3", qformat="int4")
    with pytest.raises(BackendError, match="--tp_size: only engines for CPUs and those of TensorRT"):
        make_engine(tmp_path / "int4" / "onnx", tmp_path / "ranks", backend="cuda", tp_size=2)
    with pytest.raises(BackendError, match="an engine of cuda has no profiles"):
        make_engine(tmp_path / "int4" / "onnx", tmp_path / "profiles", backend="cuda", multiple_profiles=True)


@pytest.mark.parametrize("dtype", [ir.DataType.BFLOAT16, ir.DataType.FLOAT16])
def test_a_lane_finds_its_numbers_side_by_side(dtype: ir.DataType) -> None:
    """Of a weight [K, N], as the PTX ISA draws the first matrix of m16n8k16, with zeros behind its end."""
    weight = np.random.default_rng(0).normal(size=(48, 20)).astype(np.float32)
    tiles = tile_layout(dtype).pack(weight)
    assert tiles.shape == (2, 3, 256)
    padded = np.zeros((32, 48), np.float32)
    padded[:20] = weight.T
    rounded = torch.from_numpy(padded).to(torch.bfloat16 if dtype == ir.DataType.BFLOAT16 else torch.float16)
    bits = rounded.view(torch.int16).numpy().view(np.uint16)
    for row, column, lane, number in np.ndindex(2, 3, 32, 8):
        n = row * 16 + lane // 4 + number // 2 % 2 * 8
        k = column * 16 + lane % 4 * 2 + number // 4 * 8 + number % 2
        assert tiles[row, column, lane * 8 + number] == bits[n, k]


def test_an_engine_is_built_again_where_it_differs(tmp_path: Path) -> None:
    """By the version of the kernels' layout, as by everything else that decides what is in the files."""
    engine = build(tmp_path, "qwen2")
    made = json.loads((engine / "config.json").read_text())["provenance"]
    assert made["versions"]["cuda"] == "1" and made["options"]["backend"] == "cuda"
    before = (engine / "config.json").stat().st_mtime_ns
    make_engine(tmp_path / "onnx", engine, backend="cuda", max_draft_len=3)
    assert (engine / "config.json").stat().st_mtime_ns == before
