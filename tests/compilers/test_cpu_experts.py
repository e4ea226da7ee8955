"""Mixtures of experts on CPUs: tokens are multiplied by the weights that they chose, and others are not read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch
from transformers import AutoModelForCausalLM

from specbuild.artifacts.onnx_checkpoint import open_checkpoint
from specbuild.compilers.cpu.experts import use_chosen_experts
from specrun.engine_dir.config import GRAPH_NAME, WEIGHTS_NAME, open_engine
from tests.helpers.engines import engine_graph, make_engine, make_onnx
from tests.helpers.experts import (
    BROKEN,
    CHOSEN,
    EXPERTS,
    TOKENS,
    break_experts,
    checkpoint_logits,
    int8_channels,
    logits,
    mxfp4,
    opened,
    operators,
)
from tests.helpers.families import save_checkpoint
from tests.helpers.parity import STEPS, largest_difference


def of_experts(engine: Path) -> list[str]:
    """The operators of products by experts' weights."""
    return [node.op_type for node in engine_graph(engine) if node.attributes.get_int("experts", 0)]


@pytest.mark.quick("mixtral")
@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("mixtral", torch.float32),
        ("qwen2_moe", torch.float32),
        ("gpt_oss", torch.bfloat16),
        ("llama4", torch.float32),
        ("qwen3_next", torch.float32),
    ],
)
def test_the_logits_are_those_of_transformers(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Every mixture is found, and computes what the dense form does. Bits do not depend on the shape of a pass."""
    checkpoint = save_checkpoint(tmp_path / "hf", family, dtype=dtype)
    engine = make_engine(make_onnx(checkpoint, tmp_path / "onnx"), tmp_path / "engine")
    assert of_experts(engine) == ["FloatMatMul"] * 2 * 2
    config = open_engine(engine)
    assert any("2 layers read only" in note for note in config.provenance.notes)
    assert config.exact_on
    assert largest_difference(checkpoint, engine, dtype, STEPS) < (2e-2 if dtype == torch.bfloat16 else 1e-5)


def test_unused_experts_are_not_read(tmp_path: Path) -> None:
    """Some experts of the first layer become NaN: a pass gives numbers where no token has chosen one of them."""
    checkpoint = save_checkpoint(
        tmp_path / "hf", "mixtral", num_local_experts=EXPERTS, num_experts_per_tok=CHOSEN, num_hidden_layers=1
    )
    onnx_dir = make_onnx(checkpoint, tmp_path / "onnx")
    whole = opened(make_engine(onnx_dir, tmp_path / "whole"))
    break_experts(onnx_dir, BROKEN)
    broken = opened(make_engine(onnx_dir, tmp_path / "broken"))
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    outcomes = set()
    for tokens in [[token] for token in range(1, 40)] + [[token, token + 1] for token in range(1, 40)]:
        with torch.no_grad():
            routing = model(torch.tensor([tokens]), output_router_logits=True).router_logits[0]
        uses_broken = bool((routing.topk(CHOSEN).indices < BROKEN).any())
        found = logits(broken, tokens)
        assert np.isnan(found).any() == uses_broken
        if not uses_broken:
            np.testing.assert_array_equal(found, logits(whole, tokens))
        outcomes.add((len(tokens), uses_broken))
    assert len(outcomes) == 4


@pytest.mark.quick("int4")
@pytest.mark.parametrize(("qformat", "tolerance"), [("int8", 2e-2), ("int4", 4e-2)])
def test_quantized_experts(qformat: str, tolerance: float, tmp_path: Path) -> None:
    """Every product is our operator, and the weights take few bits in the engine too."""
    checkpoint = save_checkpoint(tmp_path / "hf", "mixtral", intermediate_size=128)
    onnx_dir = make_onnx(checkpoint, tmp_path / "onnx", qformat=qformat)
    engine = make_engine(onnx_dir, tmp_path / "engine")
    assert of_experts(engine) == ["QuantizedMatMul"] * 2 * 2
    assert operators(engine)["QuantizedMatMul"] == 2 * 4 + 1  # With attention, whose q, k and v are one, and the head.
    dense = make_onnx(checkpoint, tmp_path / "dense", verify=False)
    bits = 4 if qformat == "int4" else 8
    assert open_engine(engine).weight_bytes < open_checkpoint(dense).files[WEIGHTS_NAME].bytes * (bits + 4) / 32
    (expected,) = checkpoint_logits(onnx_dir, [TOKENS])
    found = logits(opened(engine), TOKENS)
    assert np.abs(found - expected).max() < tolerance * np.abs(expected).max()  # The engine rounds inputs to 8 bits.
    (unrounded,) = checkpoint_logits(dense, [TOKENS])
    assert np.abs(unrounded - expected).max() > 1e-3 * np.abs(expected).max()


@pytest.mark.slow("test_quantized_experts")
def test_a_plan_with_quantized_experts(tmp_path: Path) -> None:
    """TensorRT-RTX takes stacked codes, and they stay packed in its plan."""
    checkpoint = save_checkpoint(
        tmp_path / "hf", "mixtral", dtype=torch.bfloat16, hidden_size=256, intermediate_size=1024, num_hidden_layers=1
    )
    sizes = {}
    for qformat in ("auto", "int4"):
        onnx_dir = make_onnx(checkpoint, tmp_path / f"{qformat}-onnx", qformat=qformat, verify=False)
        plan = make_engine(onnx_dir, tmp_path / qformat, backend="tensorrt_rtx", max_draft_len=4)
        sizes[qformat] = (plan / "rank0.engine").stat().st_size
    assert sizes["int4"] < sizes["auto"] - 4_000_000  # 3.1 million weights of the experts.


@pytest.mark.slow("test_quantized_experts")
@pytest.mark.parametrize(
    ("family", "store", "form"),
    [("gpt_oss", mxfp4, "float4 in groups of 32"), ("mixtral", int8_channels, "int8")],
)
def test_checkpoints_with_quantized_experts(
    family: str, store: Callable[[Path], None], form: str, tmp_path: Path
) -> None:
    """Their codes are taken over, and reach the engine."""
    checkpoint = save_checkpoint(tmp_path / "hf", family, dtype=torch.bfloat16)
    store(checkpoint)
    onnx_dir = make_onnx(checkpoint, tmp_path / "onnx", dtype="float32")  # Verified beside the dequantized model.
    config = open_checkpoint(onnx_dir)
    assert config.graph.quantized is not None
    assert config.graph.quantized.forms == {form: 2 * 2 * 4}
    assert not any("dequantized" in note for note in config.provenance.notes)
    engine = make_engine(onnx_dir, tmp_path / "engine")
    assert of_experts(engine) == ["QuantizedMatMul"] * 2 * 2
    dense = make_onnx(checkpoint, tmp_path / "dense", dtype="float32", dequantize=True, verify=False)
    (expected,) = checkpoint_logits(dense, [TOKENS])
    assert np.abs(logits(opened(engine), TOKENS) - expected).max() < 2e-2 * np.abs(expected).max()
    if family == "gpt_oss":  # TensorRT dequantizes float4 to 16 bits only.
        bfloat16 = make_onnx(checkpoint, tmp_path / "bfloat16", verify=False)
        plan = make_engine(bfloat16, tmp_path / "plan", backend="tensorrt_rtx", max_draft_len=4)
        assert open_engine(plan).backend.name == "tensorrt_rtx"


def test_a_model_without_experts_stays_as_it_is(tmp_path: Path) -> None:
    onnx_dir = make_onnx(save_checkpoint(tmp_path / "hf", "llama3"), tmp_path / "onnx")
    model = ir.load(onnx_dir / GRAPH_NAME)
    before = [node.name for node in model.graph]
    assert use_chosen_experts(model) == 0
    assert [node.name for node in model.graph] == before
