"""Mixtures of experts on ONNX Runtime: the experts that a pass does not use are not read."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from specbuild.artifacts.onnx_checkpoint import open_checkpoint
from specbuild.graph import ops as graphs
from specbuild.graph.moe_branches import skip_unused_experts
from specrun.backends import Backend, open_host_backend
from specrun.backends.ort_session import session_options
from specrun.engine_dir.config import GRAPH_NAME, WEIGHTS_NAME, open_engine
from specrun.sampling.sampler import Floats
from tests.conftest import make_engine, make_onnx
from tests.export.test_families import STEPS, forward, largest_difference
from tests.helpers.families import POSITIONS, save_checkpoint

EXPERTS, CHOSEN, BROKEN = 8, 2, 3
"""Of them, those that a token uses, and those whose weights are overwritten."""


def opened(engine: Path) -> Backend:
    backend = open_host_backend(engine, open_engine(engine), 0)
    backend.resize(1, POSITIONS, 0)
    return backend


def logits(backend: Backend, tokens: list[int]) -> Floats:
    """Of one text's tokens, read in one pass."""
    return forward(backend, np.array([tokens]), [0], np.arange(len(tokens))[None])


@pytest.mark.parametrize(("family", "dtype"), [("mixtral", torch.float32), ("gpt_oss", torch.bfloat16)])
def test_the_logits_are_those_of_transformers(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Every mixture is found, and its branches compute what the dense form does."""
    checkpoint = save_checkpoint(tmp_path / "hf", family, dtype=dtype)
    engine = make_engine(make_onnx(checkpoint, tmp_path / "onnx"), tmp_path / "engine")
    branches = [node for node in ir.load(engine / GRAPH_NAME).graph if node.op_type == "If"]
    assert len(branches) == 4 * 2
    assert any("2 layers read only" in note for note in open_engine(engine).provenance.notes)
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


def break_experts(onnx_dir: Path, number: int) -> None:
    """Let the weights of the first experts of every layer be NaN."""
    for value in ir.load(onnx_dir / GRAPH_NAME).graph.initializers.values():
        tensor = value.const_value
        if isinstance(tensor, ir.ExternalTensor) and len(tensor.shape) == 3:
            assert tensor.shape[0] == EXPERTS
            with Path(tensor.path).open("r+b") as file:
                file.seek(tensor.offset or 0)
                file.write(b"\xff" * (tensor.nbytes // EXPERTS * number))


def checkpoint_logits(
    onnx_dir: Path, passes: Sequence[list[int]], edit: Callable[[ir.Model], object] = lambda _model: None
) -> list[Floats]:
    """Of passes of the graph as it was converted, in which every expert is computed, and then changed by ``edit``."""
    ort, options = session_options()
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(onnx_dir))
    model = ir.load(onnx_dir / GRAPH_NAME)
    edit(model)
    graphs.drop_activation_rounding(model, ir.DataType.FLOAT8E4M3FN)  # ONNX Runtime fuses it into an invalid product.
    graphs.widen_to_float32(model)
    session = ort.InferenceSession(graphs.to_bytes(model), options)
    feeds = {
        value.name: np.zeros((1, value.shape[1], POSITIONS, value.shape[3]), np.float32)
        for value in session.get_inputs()
        if value.name.startswith("past_key_values.")
    }
    feeds["write_indices"] = np.zeros(1, np.int64)
    found = []
    for tokens in passes:
        feeds |= {"input_ids": np.array([tokens]), "logits_indices": np.arange(len(tokens))[None]}
        found += session.run(["logits"], feeds)
    return found


TOKENS = [5, 17, 200, 31, 8]


def operators(engine: Path) -> Counter[str]:
    """Of the graph and its branches."""
    return Counter(node.op_type for node in graphs.all_nodes(ir.load(engine / GRAPH_NAME)))


@pytest.mark.parametrize(
    ("qformat", "operator"),
    [("int8", "MatMulIntegerToFloat"), ("int4", "MatMulNBits")],
)
def test_quantised_experts(qformat: str, operator: str, tmp_path: Path) -> None:
    """Every product of a branch is the fast operator, and the weights take few bits in the engine too."""
    checkpoint = save_checkpoint(tmp_path / "hf", "mixtral", intermediate_size=128)
    onnx_dir = make_onnx(checkpoint, tmp_path / "onnx", qformat=qformat)
    engine = make_engine(onnx_dir, tmp_path / "engine")
    counted = operators(engine)
    assert counted["If"] == 8
    assert counted[operator] == 8 * 2 + 2 * 4 + 1  # Experts, attention, and the head.
    dense = make_onnx(checkpoint, tmp_path / "dense", verify=False)
    bits = 4 if qformat == "int4" else 8
    assert open_engine(engine).weight_bytes < open_checkpoint(dense).files[WEIGHTS_NAME].bytes * (bits + 4) / 32
    (expected,) = checkpoint_logits(onnx_dir, [TOKENS])
    found = logits(opened(engine), TOKENS)
    assert np.abs(found - expected).max() < 2e-2 * np.abs(expected).max()
    (unrounded,) = checkpoint_logits(dense, [TOKENS])
    assert np.abs(unrounded - expected).max() > 1e-3 * np.abs(expected).max()


def test_a_plan_with_quantised_experts(tmp_path: Path) -> None:
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


def mxfp4(directory: Path) -> None:
    """Let a checkpoint of gpt-oss hold its experts in MXFP4, as OpenAI stores them."""
    tensors, rng = load_file(directory / "model.safetensors"), np.random.default_rng(0)
    for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        shape = (experts, outputs, inputs // 32)
        tensors[f"{name}_blocks"] = torch.from_numpy(rng.integers(0, 256, (*shape, 16), dtype=np.uint8))
        tensors[f"{name}_scales"] = torch.from_numpy(rng.integers(122, 126, shape, dtype=np.uint8))
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    say_quantised(directory, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})


def int8_channels(directory: Path, symmetric: bool = True) -> None:
    """Let a checkpoint of Mixtral hold its experts in 8 bits, each matrix by itself, as compressed-tensors has it."""
    tensors = load_file(directory / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name]:
        weight = tensors[name].float()
        low, high = weight.aminmax(dim=1, keepdim=True)
        if symmetric:
            high = torch.maximum(-low, high)
            low = -high
        scale = (high - low) / 254
        zero = (-low / scale).round() - 127
        tensors[name] = (weight / scale + zero).round().clamp(-128, 127).to(torch.int8)
        tensors[f"{name}_scale"] = scale.bfloat16()
        if not symmetric:
            tensors[f"{name}_zero_point"] = zero.to(torch.int8)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    weights = {"num_bits": 8, "type": "int", "symmetric": symmetric, "strategy": "channel", "dynamic": False}
    group = {"targets": ["re:.*experts.*"], "weights": weights, "input_activations": None, "output_activations": None}
    config = {"quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed"}
    say_quantised(directory, {**config, "config_groups": {"group_0": group}, "ignore": ["lm_head"]})


def say_quantised(directory: Path, section: dict[str, Any]) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": section}))


@pytest.mark.parametrize(
    ("family", "store", "form"),
    [("gpt_oss", mxfp4, "float4 in groups of 32"), ("mixtral", int8_channels, "int8")],
)
def test_checkpoints_with_quantised_experts(
    family: str, store: Callable[[Path], None], form: str, tmp_path: Path
) -> None:
    """Their codes are taken over, and reach the engine."""
    checkpoint = save_checkpoint(tmp_path / "hf", family, dtype=torch.bfloat16)
    store(checkpoint)
    onnx_dir = make_onnx(checkpoint, tmp_path / "onnx", dtype="float32")  # Verified beside the dequantised model.
    config = open_checkpoint(onnx_dir)
    assert config.graph.quantised is not None
    assert config.graph.quantised.forms == {form: 2 * 2 * 4}
    assert not any("dequantised" in note for note in config.provenance.notes)
    engine = make_engine(onnx_dir, tmp_path / "engine")
    assert operators(engine)["MatMulNBits"] == 2 * 2 * 4
    dense = make_onnx(checkpoint, tmp_path / "dense", dtype="float32", dequantize=True, verify=False)
    (expected,) = checkpoint_logits(dense, [TOKENS])
    assert np.abs(logits(opened(engine), TOKENS) - expected).max() < 2e-2 * np.abs(expected).max()
    if family == "gpt_oss":  # TensorRT dequantises float4 to 16 bits only.
        bfloat16 = make_onnx(checkpoint, tmp_path / "bfloat16", verify=False)
        plan = make_engine(bfloat16, tmp_path / "plan", backend="tensorrt_rtx", max_draft_len=4)
        assert open_engine(plan).backend.name == "tensorrt_rtx"


def test_a_model_without_experts_stays_as_it_is(tmp_path: Path) -> None:
    onnx_dir = make_onnx(save_checkpoint(tmp_path / "hf", "llama3"), tmp_path / "onnx")
    model = ir.load(onnx_dir / GRAPH_NAME)
    before = [node.name for node in model.graph]
    assert skip_unused_experts(model) == 0
    assert [node.name for node in model.graph] == before
