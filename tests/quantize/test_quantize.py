"""``specbuild quantize``: what it writes, what it finds out by running the model, and what it refuses."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from specbuild.artifacts.onnx_checkpoint import open_checkpoint
from specbuild.compilers.tensorrt.formats import round_float4_inputs
from specbuild.graph.ops import FLOAT4_INPUT
from specbuild.quantization.activation_ranges import calibrate, rounded
from specbuild.quantization.calibration_data import TextOptions, read_texts
from specbuild.quantization.gptq import KeptInputs
from specbuild.quantization.quantize_model import pack_model
from specbuild.quantization.recipe import QFORMATS, QFormat, Recipe
from specbuild.quantize.compressed_tensors_format import configuration, tensors
from specbuild.quantize.quantize import AUTO, LEAST_TOP1
from specbuild.weights.activation import Activation
from specrun.builder import is_checkpoint
from specrun.engine_dir.config import open_engine
from specrun.errors import BuildConfigError
from tests.helpers.command_errors import build, error_line, says
from tests.helpers.engines import make_engine, make_onnx
from tests.helpers.families import TEXT, save_checkpoint
from tests.helpers.quantize_command import TEXTS, meta_model, run
from tests.helpers.stored_tensors import Vector


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT * 4, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("dense") / "dense", "llama3", seed=1, dtype=torch.bfloat16)


@pytest.mark.parametrize("qformat", QFORMATS)
def test_what_is_written_is_what_convert_makes_of_the_original(
    qformat: QFormat, dense: Path, text: Path, tmp_path: Path
) -> None:
    report = run(dense, tmp_path / "out", text, qformat=qformat, lm_head=True, quality=False)
    original, _ = meta_model(dense)
    rows = read_texts(TextOptions(str(text), **TEXTS), dense).calibration
    kept = KeptInputs(tmp_path / "inputs")
    largest = calibrate(original.model, rows, lambda _rows: None, kept=kept)
    expected = pack_model(original.model, Recipe(qformat, for_others=True), original.weights, largest, kept)
    loaded, found = meta_model(tmp_path / "out")
    assert found.linears.keys() == expected.linears.keys()
    for name, packed in found.linears.items():
        wanted = expected.linears[name]
        assert packed.codes.dtype == wanted.codes.dtype
        assert (packed.codes.numpy() == wanted.codes.numpy()).all()
        assert (packed.scales.numpy() == wanted.scales.numpy()).all()
        assert (packed.dequantize() == wanted.dequantize()).all() or qformat.startswith("nvfp4")
        assert packed.block == wanted.block
        assert (packed.activation and packed.activation.form) == (wanted.activation and wanted.activation.form)
        if packed.activation and packed.activation.scale:
            assert wanted.activation is not None
            assert packed.activation.scale == pytest.approx(wanted.activation.scale, rel=2**-8)
    assert report["forms"] == found.forms()
    for name, weight in original.weights.items():
        if name not in found.linears:
            assert torch.equal(loaded.weights[name][...], weight[...]), name
    for name in ("tokenizer.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (dense / name).read_bytes()


VECTORS = ["w4a16", "w4a16-odd", "w8a8", "w8a8-static", "fp8", "fp8-static", "nvfp4", "nvfp4a16"]


@pytest.mark.parametrize("name", VECTORS)
def test_tensors_and_configuration_are_the_librarys_own(name: str, tmp_path: Path) -> None:
    vector = Vector(f"ct-{name}", tmp_path)
    packed, _ = vector.weight()
    [(module, stored)] = vector.modules.items()
    made = tensors(packed)
    for suffix, tensor in made.items():
        own = stored[suffix]
        assert str(tensor.dtype).removeprefix("torch.") == str(own.dtype), suffix
        assert tensor.contiguous().view(torch.uint8).numpy().tobytes() == own.values.tobytes(), suffix
    assert set(stored) - set(made) <= {"weight_shape", "weight_g_idx", "weight_zero_point", "input_zero_point"}
    form = vector.scheme.form(module)
    vector.config["quantization_config"] = configuration({module: packed}, ["lm_head"])
    scheme = vector.read()
    assert scheme.form(module) == form
    assert scheme.form("lm_head") is None


@contextmanager
def inputs_seen(model: Any, see: Callable[[str, torch.Tensor], torch.Tensor | None]) -> Any:
    """Calls ``see`` with each product's input, as PyTorch's own hooks get it."""

    def hook(name: str) -> Any:
        return lambda _module, args: see(name, args[0])

    hooks = [
        module.register_forward_pre_hook(hook(f"{name}.weight"))
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
    ]
    yield
    for one in hooks:
        one.remove()


@pytest.mark.parametrize("family", ["llama3", "gpt2"])
def test_calibration_sees_what_pytorchs_hooks_see(family: str, tmp_path: Path, text: Path) -> None:
    directory = save_checkpoint(tmp_path / family, family)
    rows = read_texts(TextOptions(str(text), **TEXTS), directory).calibration
    found = calibrate(meta_model(directory)[0].model, rows, lambda _rows: None).inputs
    seen: dict[str, list[torch.Tensor]] = {}
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager")
    with (
        inputs_seen(model, lambda name, x: seen.setdefault(name, []).append(x.reshape(-1, x.shape[-1]))),
        torch.no_grad(),
    ):
        model(torch.from_numpy(rows))
    assert len(seen) > 8
    for name, parts in seen.items():
        if name == "lm_head.weight":  # Only the last token's is computed.
            continue
        x = torch.cat(parts)
        assert found[name] == pytest.approx(float(x.abs().max()), rel=1e-4)


@pytest.mark.parametrize("qformat", ["int8", "fp8", "int4", "nvfp4"])
def test_the_report_is_what_a_direct_computation_gives(
    qformat: QFormat, dense: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specbuild.quantization.activation_ranges._BATCH_BYTES", 1)  # A row at a time.
    report = run(dense, tmp_path / "out", text, qformat=qformat)
    assert json.loads((tmp_path / "out" / "quality.json").read_text()) == report
    rows = read_texts(TextOptions(str(text), **TEXTS), dense).held_out
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32)
    packed = meta_model(tmp_path / "out")[1].linears

    def see(name: str, x: torch.Tensor) -> torch.Tensor | None:
        activation = packed[name].activation if name in packed else None
        return x if activation is None else simulated(x, activation)

    with torch.no_grad():
        before = model(torch.from_numpy(rows)).logits[:, :-1].log_softmax(-1)
        for name, weight in packed.items():
            model.get_parameter(name).copy_(torch.from_numpy(weight.dequantize()).T)
        with inputs_seen(model, see):
            after = model(torch.from_numpy(rows)).logits[:, :-1].log_softmax(-1)
    following = torch.from_numpy(rows[:, 1:, None])
    quality = report["quality"]
    assert quality["tokens"] == following.numel()
    assert quality["original_perplexity"] == pytest.approx(float((-before.gather(2, following)).mean().exp()), rel=1e-3)
    assert quality["perplexity"] == pytest.approx(float((-after.gather(2, following)).mean().exp()), rel=0.02)
    assert quality["mean_kl"] == pytest.approx(float((before.exp() * (before - after)).sum(-1).mean()), rel=0.1)
    assert quality["top1_agreement"] == pytest.approx(
        float((before.argmax(-1) == after.argmax(-1)).float().mean()), abs=0.07
    )
    assert quality["mean_kl"] > 0


def simulated(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Written down once more: 8 bits with a scale a token, float8 with a fixed one, float4 with one every 16 values."""
    if activation.form == "float4":
        assert activation.scale is not None
        groups = x.numpy().reshape(-1, 16)
        steps = np.abs(groups).max(1, keepdims=True) / np.float32(6) / np.float32(activation.scale)
        scales = np.minimum(steps, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * np.float32(
            activation.scale
        )
        codes = (groups / np.where(scales == 0, 1, scales)).clip(-6, 6).astype(ml_dtypes.float4_e2m1fn)
        return torch.from_numpy(codes.astype(np.float32) * scales).reshape(x.shape)
    if activation.scale is None:
        scale = x.abs().amax(-1, keepdim=True) / 127
        return torch.round(x / scale) * scale
    return (x / activation.scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * activation.scale


def test_inputs_beyond_the_calibrated_range_are_clipped_and_zeros_stay() -> None:
    x = torch.tensor([[0.0, 1.0, 1000.0, -1000.0]])
    assert rounded(x, Activation("float8", 1.0)).tolist() == [[0.0, 1.0, 448.0, -448.0]]
    assert rounded(torch.zeros(2, 4), Activation("int8")).tolist() == [[0.0] * 4] * 2


def test_convert_calibrates_on_the_way(dense: Path, text: Path, tmp_path: Path) -> None:
    onnx = make_onnx(dense, tmp_path / "onnx", qformat="fp8", texts=TextOptions(str(text), **TEXTS))
    quantized = open_checkpoint(onnx).graph.quantized
    assert quantized is not None
    assert quantized.forms == {"float8, inputs float8": 14}
    graph = ir.load(onnx / "model.onnx").graph
    assert Counter(node.op_type for node in graph)["QuantizeLinear"] == 8  # Products that share an input share one.


def test_tensorrt_rounds_inputs_to_float4_where_the_checkpoint_has_their_scales(
    dense: Path, text: Path, tmp_path: Path
) -> None:
    """Standard ONNX has no form for it: products carry the scale as metadata, and others compute as they are."""
    run(dense, tmp_path / "hf", text, qformat="nvfp4", quality=False)
    onnx = make_onnx(tmp_path / "hf", tmp_path / "onnx")
    graph = ir.load(onnx / "model.onnx")
    marked = [node for node in graph.graph if FLOAT4_INPUT in node.metadata_props]
    assert len(marked) == 14
    quantized = open_checkpoint(onnx).graph.quantized
    assert quantized is not None
    assert quantized.forms == {"float4 in groups of 16, inputs float4": 14}
    config = json.loads((tmp_path / "hf" / "config.json").read_text())["quantization_config"]
    assert config["config_groups"]["group_0"]["input_activations"]["dynamic"] == "local"
    assert round_float4_inputs(graph) == 14
    assert Counter(node.op_type for node in graph.graph)["TRT_FP4DynamicQuantize"] == 14
    plan = make_engine(onnx, tmp_path / "plan", backend="tensorrt_rtx", max_draft_len=2)
    assert open_engine(plan).backend.compute_capabilities == ["12.0", "12.1"]


def test_large_checkpoints_are_written_in_shards_that_the_library_reads(
    dense: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(dense, tmp_path / "one", text, qformat="fp8", quality=False)
    monkeypatch.setattr("specbuild.quantize.shards.SHARD_BYTES", 40_000)
    run(dense, tmp_path / "many", text, qformat="fp8", quality=False)
    expected = load_file(tmp_path / "one" / "model.safetensors")
    index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert len(shards) > 3
    assert shards[0] == f"model-00001-of-{len(shards):05}.safetensors"
    found: dict[str, torch.Tensor] = {}
    for shard in shards:
        with safe_open(tmp_path / "many" / shard, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            assert all(index["weight_map"][name] == shard for name in file.keys())  # noqa: SIM118
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].float(), expected[name].float()) for name in expected)
    sizes = sum(tensor.nbytes for tensor in expected.values())
    assert index["metadata"]["total_size"] == sizes


def test_a_tied_head_stays_and_models_without_a_place_for_it_are_refused(text: Path, tmp_path: Path) -> None:
    tied = save_checkpoint(tmp_path / "tied", "qwen2")
    report = run(tied, tmp_path / "out", text, qformat="int4", lm_head=True, quality=False)
    assert report["lm_head"] == report["embedding"] == "float32"
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["quantization_config"]["ignore"] == ["lm_head"]
    gpt2 = save_checkpoint(tmp_path / "gpt2", "gpt2")
    line = error_line(build("quantize", "--model_dir", gpt2, "--output_dir", tmp_path / "no", "--no-quality"))
    says(line, "Conv1D", "specbuild convert --qformat")


def test_the_command_says_what_it_did_and_replaces_only_its_own(dense: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ["--calib_dataset", text, "--calib_size", 3, "--calib_max_seq_length", 16, "--exclude", "*.nothing"]
    result = build("quantize", "--model_dir", dense, "--output_dir", out, *options)
    assert result.exit_code == 0, result.stderr
    says(result.stderr, "--qformat auto is int8 here", "--exclude *.nothing matches no module", "perplexity", "mean KL")
    says(result.stderr, "14 in int8, inputs int8 by token; embedding bfloat16, lm_head bfloat16")
    assert is_checkpoint(out), "specrun builds its engine"
    line = error_line(build("quantize", "--model_dir", dense, "--output_dir", out, *options))
    says(line, out, "exists", "--force")
    again = build(
        "quantize", "--model_dir", dense, "--output_dir", out, "--force", "--qformat", "fp8_wo", "--no-quality"
    )
    assert again.exit_code == 0, again.stderr
    assert json.loads((out / "quality.json").read_text())["quality"] is None
    line = error_line(build("quantize", "--model_dir", out, "--output_dir", tmp_path / "twice"))
    says(line, "quantized already (compressed-tensors)", "specbuild convert")
    copy = shutil.copytree(dense, tmp_path / "somebodys")
    line = error_line(build("quantize", "--model_dir", dense, "--output_dir", copy, "--force"))
    says(line, copy, "refusing to replace")


def with_outliers(source: Path, directory: Path) -> Path:
    """A copy whose linear layers get two inputs that are much larger than the others, as in pretrained models."""
    copy = shutil.copytree(source, directory)
    path = copy / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if name.endswith("layernorm.weight"):
            tensor[:2] *= 100
    save_file(tensors, path, metadata={"format": "pt"})
    return copy


def test_auto_measures_the_model_at_hand(dense: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT * 40, encoding="utf-8")
    options = ["--calib_dataset", text, "--calib_size", 24, "--calib_max_seq_length", 32]
    outliers = with_outliers(dense, tmp_path / "outliers")
    found = {}
    for model in (dense, outliers):
        out = tmp_path / f"{model.name}-quantized"
        result = build("quantize", "--model_dir", model, "--output_dir", out, *options)
        assert result.exit_code == 0, result.stderr
        found[model.name] = json.loads((out / "quality.json").read_text())
        kept = re.findall(r"^(\w+) keeps ([\d.]+)% of the likeliest tokens", result.stderr, re.MULTILINE)
        first = next(form for form, share in kept if float(share) >= 100 * LEAST_TOP1)
        assert [form for form, _ in kept] == list(AUTO)[: len(kept)]
        says(result.stderr, f"--qformat auto is {first} here", "of the likeliest tokens")
        assert found[model.name]["qformat"] == first
    assert found["dense"]["qformat"] != found["outliers"]["qformat"] == "int8_wo"
    assert found["dense"]["quality"]["top1_agreement"] >= LEAST_TOP1


def test_auto_chooses_from_what_measured_best() -> None:
    path = Path(__file__).parents[2] / "scripts" / "benchmarks" / "results" / "quantized.json"
    rows = json.loads(path.read_text())["results"]
    measured = {form: row for form, row in rows.items() if form in QFORMATS}
    fit = [form for form, row in measured.items() if row["quality"]["top1_same"] >= LEAST_TOP1]
    speed = {
        form: max(row[way]["of_float32_alone"]["median"] for way in ("with_draft", "auto"))
        for form, row in measured.items()
    }
    assert max(fit, key=speed.__getitem__) in AUTO
    assert list(AUTO) == sorted(AUTO, key=speed.__getitem__, reverse=True)
    assert all(speed[AUTO[-1]] > speed[form] for form in measured.keys() - AUTO), "the others are slower"
    assert max(AUTO, key=lambda form: measured[form]["quality"]["top1_same"]) == AUTO[-1]
    alone = {form: row["alone"]["of_float32_alone"]["median"] for form, row in measured.items()}
    assert max(alone, key=alone.__getitem__) == "int4", "which docs/quantization.md says"


def not_utf8(path: Path) -> None:
    path.write_bytes(b"\xff\xfe text")


def no_json(path: Path) -> None:
    path.write_text('{"text": "fine"}\n{"words": 1}\n')


def no_text(path: Path) -> None:
    path.write_text('{"text": 3}\n')


@pytest.mark.parametrize(
    ("name", "write", "fragments"),
    [
        ("a.txt", lambda path: path.write_text("too short"), ["tokens, and at least two rows", "512"]),
        ("a.txt", lambda _path: None, ["no such file", "builtin"]),
        ("a.txt", not_utf8, ["cannot be read as UTF-8"]),
        ("a.jsonl", no_json, ["line 2", "'text'"]),
        ("a.jsonl", no_text, ["line 1", "no string"]),
    ],
    ids=["short", "missing", "not UTF-8", "no text", "no string"],
)
def test_bad_texts(
    name: str, write: Callable[[Path], object], fragments: list[str], dense: Path, tmp_path: Path
) -> None:
    write(tmp_path / name)
    options = ["--model_dir", dense, "--output_dir", tmp_path / "out", "--calib_dataset", tmp_path / name]
    fragments = [fragment.replace("512", "128") for fragment in fragments]  # The model has no more positions.
    for command in ("quantize", "convert"):
        says(error_line(build(command, "--qformat", "fp8", *options)), name, *fragments)
    assert not (tmp_path / "out").exists()


def test_bad_options_and_checkpoints(dense: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"

    def refused(source: Path, *options: object) -> str:
        line = error_line(build("quantize", "--model_dir", source, "--output_dir", out, *options))
        assert list(tmp_path.glob("*out*")) == []
        return line

    says(refused(dense, "--calib_size", 0), "--calib_size 0", "at least 1")
    says(refused(dense, "--calib_max_seq_length", 1), "--calib_max_seq_length 1", "at least 8")
    says(refused(dense, "--no-quality", "--qformat", "int4", "--group_size", 64), "down_proj", "96", "--group_size 64")
    says(refused(dense, "--no-quality", "--exclude", "*"), "leave no weight to quantize")
    bare = tmp_path / "bare"
    shutil.copytree(dense, bare, ignore=shutil.ignore_patterns("tokenizer*"))
    says(refused(bare), bare, "no tokenizer")
    tensors = load_file(dense / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name][3, 5] = torch.nan
    save_file(tensors, bare / "model.safetensors", {"format": "pt"})
    says(refused(bare, "--no-quality", "--qformat", "int8"), name, "not finite")
    monkeypatch.setattr("shutil.disk_usage", lambda _path: shutil._ntuple_diskusage(1, 1, 1000))
    line = error_line(full := build("quantize", "--model_dir", dense, "--output_dir", out, "--qformat", "fp8"))
    says(line, "are needed and 1.0 kB are free")
    assert "calibrate" not in full.stderr
    assert not out.exists()


@pytest.mark.quick("int4", "auto")
@pytest.mark.parametrize(
    ("command", "qformat", "flag", "unused"),
    [
        ("quantize", "int8", "--no-quality", True),
        ("quantize", "int4", "--no-quality", False),
        ("quantize", "fp8_wo", "--quality", False),
        ("quantize", "fp8", "--no-quality", False),
        ("convert", "int8", "--no-verify", False),
        ("convert", "int8_wo", "--no-verify", True),
        ("convert", "auto", "--no-verify", True),
        ("convert", "fp8", "--no-verify", False),
    ],
)
def test_options_without_effect_are_said(
    dense: Path, text: Path, tmp_path: Path, command: str, qformat: str, flag: str, unused: bool
) -> None:
    where = ["--model_dir", dense, "--output_dir", tmp_path / "out", "--qformat", qformat, flag]
    options: list[Any] = ["--calib_dataset", text, "--calib_max_seq_length", 16]
    for given in (options, []) if (command, qformat) == ("quantize", "int8") else (options,):
        result = build(command, *where, *given, "--force")
        assert result.exit_code == 0, result.stderr
        assert ("--calib_max_seq_length have no effect" in result.stderr) == (unused and bool(given))


def test_texts_are_split_into_rows_to_calibrate_with_and_rows_to_compare_on(hf: Path, tmp_path: Path) -> None:
    builtin = read_texts(TextOptions(size=10, length=32), hf / "target")
    assert builtin.calibration.shape == (10, 32)
    assert builtin.held_out.shape == (2, 32)
    lines = tmp_path / "lines.jsonl"
    lines.write_text("\n\n".join(json.dumps({"text": TEXT}) for _ in range(2)))
    few = read_texts(TextOptions(str(lines), size=100, length=40), hf / "target")
    whole = read_texts(TextOptions(str(lines), size=1000, length=8), hf / "target")
    assert len(few.held_out) == 1
    assert len(few.calibration) >= 1
    together = len(whole.calibration) + len(whole.held_out)
    assert len(whole.held_out) == -(-(together - 4) // 5)
    with pytest.raises(BuildConfigError, match="at least two rows"):
        read_texts(TextOptions(str(lines), size=1, length=5000), hf / "target")
