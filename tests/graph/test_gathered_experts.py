"""Mixtures of experts on TensorRT: as many experts are multiplied by as the tokens of a pass can use."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from transformers import AutoModelForCausalLM

from specbuild.artifacts.inspect import describe
from specbuild.compilers.trt_forms import move_zero_points
from specbuild.engine.config import engine_options
from specbuild.engine.plan import plan_engine
from specbuild.graph.moe_gather import gather_used_experts
from specrun.engine_dir.config import PLAN_NAME, open_engine
from specrun.errors import BackendError, BuildConfigError
from tests.helpers.engines import make_engine, make_onnx
from tests.helpers.experts import CHOSEN, EXPERTS, break_experts, checkpoint_logits, int8_channels, mxfp4
from tests.helpers.families import VOCAB, save_checkpoint

LENGTHS = (1, 2, 3, 5, 9, 64)


def tokens_of(length: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(length).integers(1, VOCAB, length)]


@pytest.mark.parametrize(
    ("family", "number"),
    [("mixtral", "num_local_experts"), ("qwen3_moe", "num_experts"), ("gpt_oss", "num_local_experts")],
)
def test_the_logits_are_those_of_all_experts(family: str, number: str, tmp_path: Path) -> None:
    """Passes that use fewer experts than there are, as many, and more."""
    sizes: dict[str, Any] = {number: 16}
    checkpoint = save_checkpoint(tmp_path / "hf", family, **sizes)
    onnx_dir = make_onnx(checkpoint, tmp_path / "onnx", dtype="float32", verify=False)
    found: list[int] = []
    passes = [tokens_of(length) for length in LENGTHS]
    gathered = checkpoint_logits(onnx_dir, passes, lambda model: found.append(gather_used_experts(model)))
    for own, expected in zip(gathered, checkpoint_logits(onnx_dir, passes), strict=True):
        assert np.abs(own - expected).max() < 1e-5 * np.abs(expected).max()
    assert found == [2]


def test_a_pass_reads_the_experts_that_it_can_use(tmp_path: Path) -> None:
    """The first expert becomes NaN. A token's pass reads what it chose; one of two tokens reads four in any case."""
    checkpoint = save_checkpoint(
        tmp_path / "hf", "mixtral", num_local_experts=EXPERTS, num_experts_per_tok=CHOSEN, num_hidden_layers=1
    )
    onnx_dir = make_onnx(checkpoint, tmp_path / "onnx", verify=False)
    passes = [[token] for token in range(1, 40)] + [[token, token + 1] for token in range(1, 40)]
    whole = checkpoint_logits(onnx_dir, passes, gather_used_experts)
    break_experts(onnx_dir, 1)
    assert np.isnan(checkpoint_logits(onnx_dir, passes[:1])).any()
    broken = checkpoint_logits(onnx_dir, passes, gather_used_experts)
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    outcomes = set()
    for tokens, expected, found in zip(passes, whole, broken, strict=True):
        with torch.no_grad():
            routing = model(torch.tensor([tokens]), output_router_logits=True).router_logits[0]
        used = set(routing.topk(CHOSEN).indices.flatten().tolist())
        reads_broken = 0 in used or len(used) < CHOSEN * len(tokens)
        assert np.isnan(found).any() == reads_broken
        if not reads_broken:
            np.testing.assert_array_equal(found, expected)
        outcomes.add((len(tokens), reads_broken))
    assert len(outcomes) == 4


PLAN_SIZES: dict[str, Any] = {"num_local_experts": 12, "hidden_size": 256, "intermediate_size": 512}
GATE_UP, DOWN = ("256", "1024"), ("512", "256")
"""The shapes of an expert's matrices."""


def working_memory(engine: Path) -> set[tuple[str, ...]]:
    """Shapes of the tensors that a plan of TensorRT-RTX writes while it runs; names stand for variable lengths."""
    described = re.findall(
        rb'tensor=\{[^{}]*dims=\{ ([^{}]*) \}[^{}]*region="devmem', (engine / PLAN_NAME).read_bytes()
    )
    return {tuple(dims.decode().split()) for dims in described}


def is_of_all_experts(shape: tuple[str, ...]) -> bool:
    """Whether a tensor has numbers of all experts, and more of each than how tokens are routed."""
    return len(shape) == 3 and shape[0] == "12" and shape[2] != "1"


def mixtral(directory: Path) -> Path:
    return save_checkpoint(directory, "mixtral", dtype=torch.bfloat16, num_hidden_layers=1, **PLAN_SIZES)


def gpt_oss(directory: Path) -> Path:
    checkpoint = save_checkpoint(directory, "gpt_oss", dtype=torch.bfloat16, **PLAN_SIZES)
    mxfp4(checkpoint)
    return checkpoint


def int8_with_zero_points(directory: Path) -> Path:
    checkpoint = mixtral(directory)
    int8_channels(checkpoint, symmetric=False)
    return checkpoint


@pytest.mark.parametrize(
    ("save", "qformat", "writes_all"),
    [
        (mixtral, "auto", False),
        (mixtral, "int4", False),
        (mixtral, "fp8", False),
        (mixtral, "nvfp4", True),
        (gpt_oss, "auto", True),
        (int8_with_zero_points, "auto", False),
    ],
)
def test_a_plan_multiplies_by_the_gathered_experts(
    save: Callable[[Path], Path], qformat: str, writes_all: bool, tmp_path: Path
) -> None:
    """No kernel writes anything of all experts, and their weights are in the plan once.

    writes_all: all experts' weights are dequantized into memory in every pass where they are not gathered.
    """
    onnx_dir = make_onnx(save(tmp_path / "hf"), tmp_path / "onnx", qformat=qformat, verify=False)
    sizes = {"max_draft_len": 4, "max_input_len": 32, "max_seq_len": 64, "compute_capabilities": (120,)}
    plans = {
        gather: make_engine(onnx_dir, tmp_path / str(gather), backend="tensorrt_rtx", gather_experts=gather, **sizes)
        for gather in (False, True)
    }
    whole, gathered = (working_memory(plans[gather]) for gather in (False, True))
    assert not any(is_of_all_experts(shape) for shape in gathered)
    copies = {shape[1:] for shape in gathered if len(shape) == 3 and not shape[0].isdigit()}
    assert {GATE_UP, DOWN} <= copies
    assert any(is_of_all_experts(shape) for shape in whole)
    assert (("12", *GATE_UP) in whole) == writes_all
    more = (plans[True] / PLAN_NAME).stat().st_size - (plans[False] / PLAN_NAME).stat().st_size
    assert more < 12 * (256 * 1024 + 512 * 256) / 2  # Those weights in 4 bits.
    config = open_engine(plans[True])
    assert config.build_config.gather_experts
    assert any("layers gather as many experts" in note for note in config.provenance.notes)
    assert "gathers those that it can use" in describe(plans[True], as_json=False)
    assert "gathers" not in describe(plans[False], as_json=False)


def test_zero_points_are_those_of_the_gathered_experts(tmp_path: Path) -> None:
    """What TensorRT adds to products for zero points has a part for each expert, too."""
    checkpoint = int8_with_zero_points(tmp_path / "hf")
    onnx_dir = make_onnx(checkpoint, tmp_path / "onnx", dtype="float32", verify=False)

    def as_for_tensorrt(model: ir.Model) -> None:
        assert move_zero_points(model) == 2
        assert gather_used_experts(model) == 1

    passes = [tokens_of(length) for length in (1, 3, 9)]
    gathered = checkpoint_logits(onnx_dir, passes, as_for_tensorrt)
    for found, expected in zip(gathered, checkpoint_logits(onnx_dir, passes, move_zero_points), strict=True):
        assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()


def test_what_has_no_experts_to_gather_is_refused(onnx: Path, tmp_path: Path) -> None:
    for backend, error, words in (
        ("onnxruntime", BackendError, "--gather_experts: is for engines of TensorRT"),
        ("tensorrt_rtx", BuildConfigError, "--gather_experts: .*target is no mixture of experts"),
    ):
        flags = {"checkpoint_dir": onnx / "target", "output_dir": tmp_path / "plan", "backend": backend}
        (options,) = engine_options({**flags, "gather_experts": True}, None)
        with pytest.raises(error, match=words):
            plan_engine(options)
