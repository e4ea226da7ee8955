"""``specbuild quantize`` of mixtures of experts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.nn.functional import linear, silu

from specbuild.artifacts.onnx_checkpoint import open_checkpoint
from specbuild.graph.split import split_products
from specbuild.graph.weight_slices import stored_tensor
from specbuild.quantization.activation_ranges import calibrate, rounded
from specbuild.quantization.calibration_data import TextOptions, read_texts
from specbuild.quantization.quantize_model import pack_model
from specbuild.quantization.recipe import QFormat, Recipe
from specbuild.weights.activation import Activation
from specbuild.weights.packed import shared_activation
from specrun.engine_dir.config import open_engine
from tests.helpers.command_errors import build, says
from tests.helpers.engines import make_engine, make_onnx
from tests.helpers.experts import TOKENS, checkpoint_logits, logits, opened, operators
from tests.helpers.families import TEXT, VOCAB, save_checkpoint
from tests.helpers.quantize_command import TEXTS, meta_model, run

FAMILIES = ("mixtral", "qwen3_moe", "gpt_oss")
"""The files of the last have experts stacked, each [K, N], with biases."""
FORMS = {
    "int8": "int8, inputs int8 by token",
    "int4": "int4 in groups of ",
    "fp8": "float8, inputs float8",
    "nvfp4": "float4 in groups of 16, inputs float4",
    "nvfp4_wo": "float4 in groups of 16",
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT * 4, encoding="utf-8")
    return path


@pytest.fixture(scope="module", params=FAMILIES)
def dense(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("dense") / request.param, request.param, dtype=torch.bfloat16)


def rows_of(source: Path, text: Path) -> Any:
    return read_texts(TextOptions(str(text), **TEXTS), source)


@pytest.mark.parametrize("qformat", FORMS)
def test_experts_are_stored_as_convert_quantizes_them(
    qformat: QFormat, dense: Path, text: Path, tmp_path: Path
) -> None:
    report = run(dense, tmp_path / "out", text, qformat=qformat, quality=False)
    original, _ = meta_model(dense)
    largest = calibrate(original.model, rows_of(dense, text).calibration, lambda _rows: None)
    expected = pack_model(original.model, Recipe(qformat, for_others=True), original.weights, largest)
    loaded, found = meta_model(tmp_path / "out")
    assert found.experts.keys() == expected.experts.keys()
    assert len(found.experts) == 4
    for name, experts in found.experts.items():
        assert len(experts) == 4
        for packed, wanted in zip(experts, expected.experts[name], strict=True):
            assert (packed.codes.numpy() == wanted.codes.numpy()).all()
            assert (packed.scales.numpy() == wanted.scales.numpy()).all()
            assert np.allclose(packed.dequantize(), wanted.dequantize(), rtol=1e-6)
        shared, wanted_activation = shared_activation(experts), shared_activation(expected.experts[name])
        assert (shared and shared.form) == (wanted_activation and wanted_activation.form)
        if shared and shared.scale:
            assert wanted_activation is not None
            assert shared.scale == pytest.approx(wanted_activation.scale, rel=2**-8)
    for name, weight in original.weights.items():
        if name not in found.linears and name not in found.experts:
            assert torch.equal(loaded.weights[name][...], weight[...]), name
    assert sum(count for form, count in report["forms"].items() if form.startswith(FORMS[qformat])) == 16 + 8
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    routers = {f"model.layers.{layer}.{name}" for layer in (0, 1) for name in ("mlp.gate", "mlp.router")}
    kept = {name.replace("block_sparse_moe", "mlp") for name in config["ignore"]}
    assert kept == {"lm_head", *routers & kept}
    assert len(kept) == 3


def mixture(see: Callable[[str, int, torch.Tensor], torch.Tensor]) -> Any:
    """Mixtral's experts written down once more; ``see`` sees each product's input, and may change it."""

    def forward(self: Any, states: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(states)
        for expert in range(self.num_experts):
            tokens, place = torch.where(index == expert)
            if len(tokens):
                both = linear(see(f"{self.name}.gate_up_proj", expert, states[tokens]), self.gate_up_proj[expert])
                gate, up = both.chunk(2, dim=-1)
                inner = see(f"{self.name}.down_proj", expert, silu(gate) * up)
                total[tokens] += linear(inner, self.down_proj[expert]) * weights[tokens, place, None]
        return total

    return forward


def written_down(directory: Path, see: Callable[[str, int, torch.Tensor], torch.Tensor]) -> Any:
    """A checkpoint of Mixtral as transformers computes it, but for its experts."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, experts_implementation="eager"
    )
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            module.name = name
            module.forward = mixture(see).__get__(module)
    return model


def test_calibration_sees_the_inputs_of_each_expert(text: Path, tmp_path: Path) -> None:
    directory = save_checkpoint(tmp_path / "mixtral", "mixtral", num_local_experts=6)
    rows = rows_of(directory, text).calibration
    found = calibrate(meta_model(directory)[0].model, rows, lambda _rows: None).experts
    seen: dict[str, dict[int, float]] = {}

    def see(name: str, expert: int, x: torch.Tensor) -> torch.Tensor:
        seen.setdefault(name, {})[expert] = float(x.abs().max())
        return x

    with torch.no_grad():
        written_down(directory, see)(torch.from_numpy(rows))
    assert len(seen) == 4
    assert found.keys() == seen.keys()
    for name, largest in seen.items():
        assert found[name] == pytest.approx(largest, rel=1e-4)
        assert len(set(largest.values())) > 1


@pytest.mark.parametrize("qformat", ["fp8", "nvfp4"])
def test_the_report_is_what_a_direct_computation_gives(qformat: QFormat, text: Path, tmp_path: Path) -> None:
    source = save_checkpoint(tmp_path / "mixtral", "mixtral", dtype=torch.bfloat16)
    quality = run(source, tmp_path / "out", text, qformat=qformat)["quality"]
    packed = meta_model(tmp_path / "out")[1]
    activations = packed.activations()

    def see(name: str, _expert: int, x: torch.Tensor) -> torch.Tensor:
        activation = activations[name]
        assert isinstance(activation, Activation)
        return rounded(x, activation)

    def hook(name: str) -> Any:
        return lambda _module, args: see(name, 0, args[0])

    model = written_down(source, lambda _name, _expert, x: x)
    rows = torch.from_numpy(rows_of(source, text).held_out)
    with torch.no_grad():
        before = model(rows).logits[:, :-1].log_softmax(-1)
        model = written_down(source, see)
        for name, weight in packed.linears.items():
            model.get_parameter(name).copy_(torch.from_numpy(weight.dequantize()).T)
            model.get_submodule(name.removesuffix(".weight")).register_forward_pre_hook(hook(name))
        for name, experts in packed.experts.items():
            weights = [torch.from_numpy(one.dequantize()).T for one in experts]
            model.get_parameter(name).copy_(torch.stack(weights))
        after = model(rows).logits[:, :-1].log_softmax(-1)
    following = rows[:, 1:, None]
    assert quality["perplexity"] == pytest.approx(float((-after.gather(2, following)).mean().exp()), rel=0.02)
    assert quality["mean_kl"] == pytest.approx(float((before.exp() * (before - after)).sum(-1).mean()), rel=0.1)


def test_an_expert_that_no_token_reaches_has_the_largest_scale_of_its_layer(text: Path, tmp_path: Path) -> None:
    source = save_checkpoint(tmp_path / "mixtral", "mixtral", num_experts_per_tok=1, dtype=torch.bfloat16)
    tensors = load_file(source / "model.safetensors")
    [router] = [tensor for name, tensor in tensors.items() if "layers.1." in name and name.endswith("gate.weight")]
    router[3] = (router[0] + router[1]) / 2  # Never the largest.
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    options = ["--calib_dataset", text, "--calib_size", 3, "--calib_max_seq_length", 16, "--no-quality"]
    out = tmp_path / "out"
    result = build("quantize", "--model_dir", source, "--output_dir", out, "--qformat", "fp8", *options)
    assert result.exit_code == 0, result.stderr
    unreached = json.loads((out / "quality.json").read_text())["unreached_experts"]
    silent = unreached["model.layers.1.mlp.experts"]
    assert 3 in silent
    says(result.stderr, f"no token reached {sum(map(len, unreached.values()))} experts", "largest scale")
    written = load_file(out / "model.safetensors")
    for part in ("w1", "w2", "w3"):
        names = [f"model.layers.1.block_sparse_moe.experts.{expert}.{part}.input_scale" for expert in range(4)]
        scales = [float(written[name]) for name in names]
        reached = {scales[expert] for expert in range(4) if expert not in silent}
        assert scales[3] == max(reached) > min(reached)
    weight_only = run(source, out, text, qformat="int8", quality=False, force=True)
    assert weight_only["unreached_experts"] is None


def test_experts_may_stay_as_they_are(dense: Path, text: Path, tmp_path: Path) -> None:
    """All of them, or some projections."""
    for pattern, count in (("*.experts.*", 0), ("*.down_proj", 4)):
        report = run(dense, tmp_path / "out", text, qformat="fp8_wo", exclude=(pattern,), quality=False, force=True)
        loaded, found = meta_model(tmp_path / "out")
        assert sum(map(len, found.experts.values())) == count * 2
        assert report["forms"] == {"float8": 8 + count * 2}
        original, _ = meta_model(dense)
        for name, weight in original.weights.items():
            if "experts" in name and name not in found.experts:
                assert torch.equal(loaded.weights[name][...], weight[...]), name


@pytest.mark.quick("mixtral")
@pytest.mark.parametrize(("family", "qformat"), [("mixtral", "int8"), ("mixtral", "nvfp4_wo"), ("gpt_oss", "fp8")])
def test_convert_and_engine_take_what_quantize_wrote(family: str, qformat: QFormat, text: Path, tmp_path: Path) -> None:
    source = save_checkpoint(tmp_path / "dense", family, dtype=torch.bfloat16)
    run(source, tmp_path / "hf", text, qformat=qformat, quality=False)
    onnx_dir = make_onnx(tmp_path / "hf", tmp_path / "onnx", dtype="float32")  # Verified.
    notes = open_checkpoint(onnx_dir).provenance.notes
    assert not any("dequantized" in note or "keep their precision" in note for note in notes)
    engine = make_engine(onnx_dir, tmp_path / "engine")
    assert operators(engine)["QuantizedMatMul"] == 2 * 4
    dense = make_onnx(tmp_path / "hf", tmp_path / "dense-onnx", dtype="float32", dequantize=True, verify=False)
    (expected,) = checkpoint_logits(dense, [TOKENS])
    difference = abs(logits(opened(engine), TOKENS) - expected).max(axis=-1)
    # One token's router may be near a tie, and choose other experts once inputs are rounded.
    assert np.median(difference) < 5e-2 * abs(expected).max()


@pytest.mark.quick("nvfp4")
@pytest.mark.parametrize("qformat", ["fp8", "nvfp4"])
def test_a_plan_rounds_the_inputs_of_experts(qformat: QFormat, text: Path, tmp_path: Path) -> None:
    source = save_checkpoint(tmp_path / "hf", "mixtral", dtype=torch.bfloat16, num_hidden_layers=1)
    texts = TextOptions(str(text), **TEXTS)
    onnx_dir = make_onnx(source, tmp_path / "onnx", qformat=qformat, texts=texts)
    quantized = open_checkpoint(onnx_dir).graph.quantized
    assert quantized is not None
    assert quantized.forms == {FORMS[qformat]: 4 + 8}
    plan = make_engine(onnx_dir, tmp_path / "plan", backend="tensorrt_rtx", max_draft_len=2)
    assert open_engine(plan).backend.name == "tensorrt_rtx"


@pytest.mark.quick("mixtral-int4")
@pytest.mark.parametrize(
    ("family", "qformat"), [("mixtral", "int8"), ("mixtral", "int4"), ("gpt_oss", "nvfp4_wo"), ("llama3", "int4")]
)
def test_verification_dequantizes_weights_in_slices(
    family: str, qformat: QFormat, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``convert`` compares the sliced graph with the model: a slice of other rows or scales would be found."""
    most = 1 << 11
    largest: list[int] = []

    def split(model: ir.Model, elements: int) -> None:
        split_products(model, elements)
        codes = [node.inputs[0] for node in model.graph if node.op_type == "DequantizeLinear"]
        sizes = [tensor.size for value in codes if (tensor := stored_tensor(value)) is not None]
        largest.append(max(sizes))

    monkeypatch.setattr("specbuild.convert.verify.SLICE", most)
    monkeypatch.setattr("specbuild.convert.verify._PIECE", most)
    monkeypatch.setattr("specbuild.convert.verify.split_products", split)
    source = save_checkpoint(tmp_path / "hf", family, dtype=torch.bfloat16, tie_word_embeddings=False)
    make_onnx(source, tmp_path / "onnx", qformat=qformat, exclude=("model.embed_tokens",), verify=True)
    block_of_widest = {"int4": 32 * VOCAB, "int8": 32 * VOCAB, "nvfp4_wo": 16 * 192}
    assert 0 < max(largest) <= block_of_widest.get(qformat, most)
