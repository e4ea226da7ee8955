"""Every family: parity with Hugging Face through real files, and real TensorRT-RTX plans of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from torch.export import ExportedProgram

from specbuild.artifacts.onnx_checkpoint import open_checkpoint
from specrun.backends import open_host_backend
from specrun.engine_dir.config import GRAPH_NAME, EngineConfig, open_engine
from specrun.engine_dir.contract import past_names, present_names
from tests.helpers.engines import make_engine, make_onnx
from tests.helpers.families import FAMILIES, POSITIONS, VOCAB, save_checkpoint
from tests.helpers.masks import kept_masks, walk
from tests.helpers.parity import STEPS, forward, largest_difference
from tests.helpers.ranks import shard_difference

MASKED = {"mistral": 2, "gemma3": 2, "llama4": 1}
"""Attention layers that keep their mask, which has a window or chunks. Gemma 2's and DeepSeek's attention is no
Attention node at all."""

CALLED_ONE_BY_ONE = ("mixtral", "gemma2", "deepseek_v2", "llama4")
"""Families whose engines for CUDA have operators that were not captured on a GPU."""

CUT_IN_THEIR_OWN_WAY = ("llama3.2", "gpt2", "olmo2", "gemma2", "mixtral", "deepseek_v2")
"""Families of whose ranks plans are compiled. What the ranks of every family compute is compared with one rank."""


def check_plan(engine: Path, dtype: str, draft_len: int) -> None:
    """A compiled plan has the contract's inputs, its profiles, and every cache output in its input's memory."""
    config = open_engine(engine)
    layers = config.graph.layers
    assert config.backend.name == "tensorrt_rtx"
    assert not any("fused" in note for note in config.provenance.notes)
    assert (engine / "rank0.engine").stat().st_size > 100_000
    tensors = {tensor.name: tensor for tensor in config.io}
    assert {name for name, tensor in tensors.items() if tensor.kind == "input"} == {
        "input_ids",
        "write_indices",
        "logits_indices",
        *past_names(layers),
    }
    length = config.build_config.max_seq_len + draft_len + 1
    rounded = next(n for n in range(length, length + 8) if n % 8 == 0)
    for past, present in zip(past_names(layers), present_names(layers), strict=True):
        assert tensors[present].aliases == past
        assert tensors[present].dtype == tensors[past].dtype == dtype
        assert tensors[present].shape == tensors[past].shape
        assert tensors[past].shape[2] == rounded == config.build_config.cache_length
    assert tensors["logits"].dtype == "float32"
    assert tensors["logits"].shape == ["batch", "logits", VOCAB]
    context, generation = config.build_config.profiles
    assert context.sequence[2] == config.build_config.max_input_len
    widest = draft_len + 1 if draft_len else 2
    assert (generation.sequence[0], generation.sequence[2]) == (1, widest)
    assert generation.sequence[1] == (widest if draft_len else 1)
    assert context.batch[2] == generation.batch[2] == config.build_config.max_batch_size


@pytest.mark.quick("deepseek_v2", "mixtral")
@pytest.mark.parametrize("family", FAMILIES)
def test_family(family: str, tmp_path: Path, decomposed: list[ExportedProgram]) -> None:
    """Saved in float32 (Mixtral in shards), converted to float16, verified, run, compiled."""
    checkpoint = save_checkpoint(tmp_path / "hf", family, shards=family == "mixtral")
    if family == "mixtral":
        assert len(list(checkpoint.glob("*.safetensors"))) > 1
    # longrope's long frequencies are tested below; transformers uses the short ones up to 32 positions.
    limit = {"max_seq_len": 32} if family == "phi3-longrope" else {}
    onnx_dir = make_onnx(checkpoint, tmp_path / "onnx", dtype="float16", **limit)
    assert not decomposed
    config = open_checkpoint(onnx_dir)
    assert config.graph.dtype == "float16"
    assert config.max_logit_difference is not None
    assert config.max_logit_difference < 1e-2
    opsets = onnx.load(onnx_dir / GRAPH_NAME, load_external_data=False).opset_import
    assert [(opset.domain, opset.version) for opset in opsets] == [("", 24)]
    engine = make_engine(onnx_dir, tmp_path / "ort")
    assert largest_difference(checkpoint, engine, torch.float16, STEPS) < 1e-3
    cuda = make_engine(onnx_dir, tmp_path / "cuda", backend="onnxruntime", device="cuda")
    assert open_engine(cuda).backend.capturable == (family not in CALLED_ONE_BY_ONE)
    assert kept_masks(cuda / GRAPH_NAME) == MASKED.get(family, 0)
    masked = walk(onnx_dir / GRAPH_NAME)
    assert np.abs(walk(cuda / GRAPH_NAME) - masked).max() < 1e-3 * np.abs(masked).max()
    for ranks in (2, 4):
        assert shard_difference(onnx_dir, ranks) < 1e-5
    if family in CUT_IN_THEIR_OWN_WAY:
        plans = open_engine(make_engine(onnx_dir, tmp_path / "ranks", backend="tensorrt_rtx", tp_size=2))
        assert {"rank0.engine", "rank1.engine"} <= plans.files.keys()
    check_plan(make_engine(onnx_dir, tmp_path / "target", backend="tensorrt_rtx", max_draft_len=4), "float16", 4)
    if family in ("llama3.2", "gemma2"):
        check_plan(make_engine(onnx_dir, tmp_path / "draft", backend="tensorrt_rtx"), "float16", 0)


@pytest.mark.quick("llama3.2-bfloat16")
@pytest.mark.parametrize(("family", "dtype"), [("llama3.2", "bfloat16"), ("gemma2", "float32")])
def test_other_dtypes(family: str, dtype: str, tmp_path: Path) -> None:
    """``--dtype auto`` keeps the checkpoint's own; float32 attention is taken apart for TensorRT."""
    stored = getattr(torch, dtype)
    checkpoint = save_checkpoint(tmp_path / "hf", family, dtype=stored)
    onnx_dir = make_onnx(checkpoint, tmp_path / "onnx")
    assert open_checkpoint(onnx_dir).graph.dtype == dtype
    engine = make_engine(onnx_dir, tmp_path / "ort")
    # Some constants (Gemma's embedding scale) are rounded to the checkpoint's 16 bits in the graph.
    tolerance = 2e-2 if dtype == "bfloat16" else 1e-5
    assert largest_difference(checkpoint, engine, stored, STEPS) < tolerance
    plan = make_engine(onnx_dir, tmp_path / "rtx", backend="tensorrt_rtx", max_draft_len=4)
    check_plan(plan, dtype, 4)


@pytest.mark.quick("stored0")
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_norms_that_are_scaled_in_float32(stored: torch.dtype, tmp_path: Path) -> None:
    """gpt-oss's. Of a float32 checkpoint their weights stay so, and what they give has the model's dtype even then."""
    checkpoint = save_checkpoint(tmp_path / "hf", "gpt_oss", dtype=stored)
    onnx_dir = make_onnx(checkpoint, tmp_path / "onnx", dtype="bfloat16", verify=False)
    model = onnx.load(onnx_dir / GRAPH_NAME, load_external_data=False)
    assert sum(node.op_type == "RMSNormalization" for node in model.graph.node) == 5
    onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True)


def test_longrope_beyond_the_trained_length(tmp_path: Path) -> None:
    """With room for more than the trained length, the long frequencies hold for every position, and it is said."""
    checkpoint = save_checkpoint(tmp_path / "hf", "phi3-longrope")
    onnx_dir = make_onnx(checkpoint, tmp_path / "onnx", max_seq_len=64)
    assert any("long frequencies" in note for note in open_checkpoint(onnx_dir).provenance.notes)
    engine = make_engine(onnx_dir, tmp_path / "ort")
    # transformers chooses by the longest position, so every comparison is beyond the trained 32.
    assert largest_difference(checkpoint, engine, torch.float32, [(35, 40), (1, 1), (5, 3)]) < 1e-4


def test_tied_embeddings_are_stored_once(tmp_path: Path) -> None:
    """A tied embedding is one tensor in the checkpoint directory, as it is in the HF checkpoint."""
    checkpoint = save_checkpoint(tmp_path / "hf", "qwen2")
    onnx_dir = make_onnx(checkpoint, tmp_path / "onnx", verify=False)
    stored = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    assert (onnx_dir / "model.onnx.data").stat().st_size < 1.02 * stored


def test_padding_beyond_learned_positions(tmp_path: Path) -> None:
    """A row at the end of a learned position table beside a longer input: the padding must not read past the table."""
    checkpoint = save_checkpoint(tmp_path / "hf", "gpt2")
    engine = make_engine(make_onnx(checkpoint, tmp_path / "onnx", verify=False), tmp_path / "ort", max_draft_len=4)
    config: EngineConfig = open_engine(engine)
    backend = open_host_backend(engine, config, 0)
    backend.resize(1, config.build_config.cache_length, 0)
    logits = forward(backend, np.zeros((1, 5), np.int64), POSITIONS - 1, np.zeros((1, 1), np.int64))
    assert np.isfinite(logits).all()
