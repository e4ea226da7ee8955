"""Engines for our own CUDA kernels: which models have such layers, what others are told, and how weights lie."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import safetensors
import torch

from specbuild.quantization.calibration_data import TextOptions
from specrun.engine_dir.config import LAYER_WEIGHTS_NAME, LAYERS_NAME, open_engine
from specrun.engine_dir.layers import STEPS, Decoder
from specrun.errors import BackendError, BuildError
from tests.helpers.engines import make_engine, make_onnx
from tests.helpers.families import save_checkpoint

FLOAT4 = [sign * size for sign in (1, -1) for size in (0, 0.5, 1, 1.5, 2, 3, 4, 6)]
"""The numbers of e2m1, by code."""


def build(root: Path, family: str, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Path:
    onnx = make_onnx(save_checkpoint(root / "hf", family, dtype=dtype), root / "onnx", verify=False, **options)
    return make_engine(onnx, root / "engine", backend="cuda", max_draft_len=3)


def test_the_layers_are_described_beside_their_weights(tmp_path: Path) -> None:
    engine = build(tmp_path, "gemma3")
    decoder = Decoder.model_validate_json((engine / LAYERS_NAME).read_text())
    assert [layer.attention.window for layer in decoder.layers] == [6, 6, 0]
    assert decoder.embedding.weight == decoder.head.weight, "tied embeddings are stored once"
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
        ("gpt_neox", "layer 0: .* comes from Transpose"),
        ("qwen2_moe", "layer 0: a shared expert"),
        ("lfm2", "runs no recurrent layers"),
        ("deepseek_v2", "layer 0: "),
        ("llama4", "layer 0: "),
    ],
)
def test_other_models_are_told_which_layer_is_in_the_way(tmp_path: Path, family: str, says: str) -> None:
    with pytest.raises(BuildError, match=f"{says}.*build with --backend tensorrt"):
        build(tmp_path, family)
    assert not (tmp_path / "engine").exists()


def test_a_gate_with_a_bias_is_not_taken_for_one_without(tmp_path: Path) -> None:
    hf = save_checkpoint(tmp_path / "hf", "llama3", dtype=torch.bfloat16, mlp_bias=True)
    with pytest.raises(BuildError, match="layer 0: a gate with a bias"):
        make_engine(make_onnx(hf, tmp_path / "onnx", verify=False), tmp_path / "engine", backend="cuda")


def test_numbers_of_other_kinds_are_told_how_to_convert(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="convert with --dtype bfloat16 or float16"):
        build(tmp_path / "float32", "llama3", torch.float32)
    with pytest.raises(BuildError, match="no caches in few bits yet"):
        build(tmp_path / "cache", "llama3", kv_cache_dtype="int8", texts=TextOptions(size=2, length=16))
    with pytest.raises(BackendError, match="--tp_size: only engines for CPUs and those of TensorRT"):
        make_engine(tmp_path / "cache" / "onnx", tmp_path / "ranks", backend="cuda", tp_size=2)
    with pytest.raises(BackendError, match="an engine of cuda has no profiles"):
        make_engine(tmp_path / "cache" / "onnx", tmp_path / "profiles", backend="cuda", multiple_profiles=True)


def numbers_of(engine: Path, name: str) -> npt.NDArray[np.float32]:
    """A weight [N, K], read as the kernels read it: lane by lane, as the PTX ISA draws the matrix a of m16n8k16."""
    decoder = Decoder.model_validate_json((engine / LAYERS_NAME).read_text())
    content = (engine / LAYER_WEIGHTS_NAME).read_bytes()

    def stored(of: str, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        tensor = decoder.tensors[of]
        return np.frombuffer(content, dtype, tensor.nbytes // np.dtype(dtype).itemsize, tensor.offset)

    linear = getattr(decoder.layers[0], name)
    tiles = STEPS[linear.bits]
    found = np.zeros((linear.outputs, -(-linear.inputs // (16 * tiles)) * 16 * tiles), np.float32)
    steps = found.shape[1] // (16 * tiles)
    for n, k in np.ndindex(*found.shape):
        step, tile = n // 16 * steps + k // (16 * tiles), k // 16 % tiles
        lane, register, half = n % 8 * 4 + k % 8 // 2, k % 16 // 8 * 2 + n % 16 // 8, n % 16 // 8
        at = step * 32 + lane
        if linear.bits == 16:
            bits = stored(linear.weight, np.uint16)[at * 8 + 2 * register + k % 2]
            found[n, k] = (np.uint32(bits) << np.uint32(16)).view(np.float32)
            continue
        if linear.bits == 8:
            kind = ml_dtypes.float8_e4m3fn if linear.has_floats else np.int8
            code = float(stored(linear.weight, kind)[at * 16 + tile * 8 + 2 * register + k % 2])
        else:
            nibble = int(stored(linear.weight, np.uint32)[at * 4 + tile]) >> (4 * register + 16 * (k % 2)) & 15
            code = FLOAT4[nibble] if linear.has_floats else nibble - 8
        of_scale = linear.group // 16
        groups = tiles // of_scale
        group = ((step * 8 + n % 8) * 2 + half) * groups + tile // of_scale
        offset = stored(linear.offsets, np.float16)[group] if linear.offsets else 0
        found[n, k] = stored(linear.units, np.float32)[n] * (
            np.float32(stored(linear.scales, np.float16)[group]) * code + np.float32(offset)
        )
    return found[:, : linear.inputs]


@pytest.mark.parametrize(
    ("qformat", "group_size", "worst"),
    [
        ("auto", None, 0.0),
        ("int8", None, 0.01),
        ("int4", None, 0.15),
        ("int4", 16, 0.13),
        ("int4_sym", None, 0.2),
        ("fp8_wo", None, 0.03),
        ("nvfp4_wo", None, 0.13),
    ],
)
def test_a_lane_finds_its_numbers_side_by_side(
    tmp_path: Path, qformat: str, group_size: int | None, worst: float
) -> None:
    """Those of the checkpoint, whose widths are no multiple of what a lane reads at once."""
    hf = save_checkpoint(tmp_path / "hf", "llama3", dtype=torch.bfloat16, intermediate_size=96)
    onnx = make_onnx(hf, tmp_path / "onnx", verify=False, qformat=qformat, group_size=group_size)
    engine = make_engine(onnx, tmp_path / "engine", backend="cuda")
    with safetensors.safe_open(hf / "model.safetensors", "pt") as file:
        expected = file.get_tensor("model.layers.0.mlp.down_proj.weight").float().numpy()
    found = numbers_of(engine, "down")
    assert np.linalg.norm(found - expected) <= worst * np.linalg.norm(expected)


def test_an_engine_is_built_again_where_it_differs(tmp_path: Path) -> None:
    """By the version of the kernels' layout, as by everything else that decides what is in the files."""
    engine = build(tmp_path, "qwen2")
    made = json.loads((engine / "config.json").read_text())["provenance"]
    assert made["versions"]["cuda"] == "1" and made["options"]["backend"] == "cuda"
    before = (engine / "config.json").stat().st_mtime_ns
    make_engine(tmp_path / "onnx", engine, backend="cuda", max_draft_len=3)
    assert (engine / "config.json").stat().st_mtime_ns == before
