"""Keys and values in 8 bits: what rounding does, what it must not change, and which tests would see a wrong one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.cache_utils import DynamicCache

from specbuild.artifacts.inspect import describe
from specbuild.artifacts.onnx_checkpoint import open_checkpoint
from specbuild.convert.options import QuantizeOptions
from specbuild.convert.verify import compare
from specbuild.export.reference import reference_logits
from specbuild.graph import ops as graphs
from specbuild.graph.kv_cache_qdq import cache_updates
from specbuild.quantization.calibration_data import TextOptions
from specbuild.quantize.quantize import quantize
from specbuild.weights.cache_codes import LARGEST_CODE, CacheCode
from specbuild.weights.kv_cache import (
    CacheRounding,
    ObservedCache,
    RoundedCache,
    TensorRounding,
    coarser,
    rounding_for,
)
from specrun import DraftTargetConfig, SpeculativeDecoder
from specrun.backends import open_host_backend
from specrun.engine_dir.config import GRAPH_NAME, open_engine
from specrun.errors import (
    BackendError,
    BuildConfigError,
    BuildError,
    CheckpointError,
    UnsupportedModelError,
    VerificationError,
)
from specrun.evaluation.verify import verify
from specrun.request.request import Request
from specrun.sampling.sampler import SamplingParams
from tests.helpers.command_errors import build, error_line, says
from tests.helpers.engines import make_engine, make_onnx, quiet
from tests.helpers.families import TEXT, VOCAB, save_checkpoint
from tests.helpers.rounded_caches import in_floats
from tests.helpers.tables import decode

Floats = npt.NDArray[np.float32]
LENGTH = 40
"""Tokens that engines and models are compared on."""
SIZES: dict[str, Any] = {"max_input_len": 48, "max_batch_size": 4, "max_draft_len": 6}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> TextOptions:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT * 8, encoding="utf-8")
    return TextOptions(str(path), size=8, length=32)


def tokens() -> npt.NDArray[np.int64]:
    return np.random.default_rng(3).integers(0, VOCAB, (1, LENGTH))


def model_of(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager", dtype=torch.float32).eval()


def model_logits(model: Any, rounding: CacheRounding | None = None) -> Floats:
    cache = RoundedCache(rounding) if rounding else None
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(tokens()), past_key_values=cache, use_cache=bool(cache)).logits
    found: Floats = logits.numpy()[0]
    return found


def engine_logits(engine: Path, chunks: tuple[int, ...] = (LENGTH,)) -> Floats:
    """Of all tokens, fed in these chunks."""
    backend, start, found = open_host_backend(engine, open_engine(engine), blocks=0), 0, []
    backend.resize(1, 64, 0)
    for chunk in chunks:
        step = backend.bind(0, 1, chunk, chunk)
        step.input_ids[...] = tokens()[:, start : start + chunk]
        step.write_indices[...], step.logits_indices[0] = start, range(chunk)
        step.run()
        found.append(step.logits[0].copy())
        start += chunk
    backend.close()
    return np.concatenate(found)


def stored_in(checkpoint: Path) -> CacheRounding:
    """The rounding that stands in a checkpoint's graph."""
    tensors = []
    for rounding, scatter, _ in cache_updates(ir.load(checkpoint / GRAPH_NAME)):
        x, scale, past = rounding.inputs[0], rounding.inputs[1], scatter.inputs[0]
        assert x is not None and scale is not None and scale.const_value is not None and past is not None
        divide, shape = x.producer(), past.shape
        assert divide is not None and shape is not None
        factors = np.ones((shape[1], shape[3]), np.float32)  # type: ignore[type-var]
        if divide.op_type == "Div":  # Otherwise all channels have the same step.
            factors = divide.inputs[1].const_value.numpy()[:, 0]  # type: ignore[union-attr]
        tensors.append(TensorRounding(float(scale.const_value.numpy()), np.array(factors)))
    code: CacheCode = "int8" if open_checkpoint(checkpoint).graph.kv_cache_dtype == "int8" else "float8_e4m3fn"
    return CacheRounding(code, tuple(tensors))


def changed_graph(checkpoint: Path, output: Path, change: Callable[[ir.Model], None]) -> Path:
    """The graph of ``checkpoint`` after ``change``."""
    model = ir.load(checkpoint / GRAPH_NAME)
    change(model)
    output.mkdir()
    graphs.save(model, output / GRAPH_NAME)
    return output / GRAPH_NAME


# Rounding


@pytest.mark.parametrize("computed_in", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("code", ["int8", "float8_e4m3fn"])
def test_each_channel_is_rounded_by_its_own_step(code: CacheCode, computed_in: torch.dtype) -> None:
    spread = np.logspace(-2, 2, 16, dtype=np.float32)
    x = np.random.default_rng(0).uniform(-1, 1, (2, 3, 50, 16)).astype(np.float32) * spread
    largest = np.abs(x).max(axis=(0, 2))
    ((tensor, _)) = rounding_for(code, [largest, largest], computed_in).tensors
    assert torch.from_numpy(tensor.factors).to(computed_in).float().numpy().tobytes() == tensor.factors.tobytes()
    found = tensor.rounded(torch.from_numpy(x), code).numpy()
    steps = tensor.factors[:, None] * tensor.scale
    error = np.abs(found - x)
    if code == "int8":
        assert (error <= 0.501 * steps).all()
        loud = largest >= largest.max(axis=-1, keepdims=True) / 32
        assert ((steps[:, 0] * 127 < 1.2 * largest) | ~loud).all()
    else:  # 3 bits behind the first; numbers below 2 ** -6 have a fixed step.
        assert (error <= np.maximum(np.abs(x) * 2.0**-4, steps * 2.0**-10)).all()
        assert (np.log2(tensor.factors) % 1 == 0).all()
    beyond = tensor.rounded(torch.from_numpy(100 * x), code).numpy()
    assert (np.abs(beyond) <= LARGEST_CODE[code] * steps * 1.0001).all(), "what is larger is cut off"
    assert np.isfinite(beyond).all()


def test_a_silent_head_and_one_step_for_all() -> None:
    silent = np.zeros((2, 4), np.float32)
    silent[1] = [1, 2, 3, 4]
    for values in (silent, np.zeros((2, 4), np.float32)):
        (tensor,) = rounding_for("int8", [values], torch.float32).tensors
        assert (tensor.factors > 0).all()
        assert np.isfinite(tensor.factors).all()
    (whole,), (heads,) = coarser("float8_e4m3fn", [silent]), coarser("int8", [silent])
    assert (whole == 4).all()
    assert heads.tolist() == [[0] * 4, [4] * 4]
    assert not rounding_for("float8_e4m3fn", [whole], torch.bfloat16).tensors[0].is_scaled


def test_calibration_sees_the_largest_of_each_channel(hf: Path) -> None:
    model, seen, kept = model_of(hf / "target"), ObservedCache(), []
    rows = torch.from_numpy(np.random.default_rng(0).integers(0, VOCAB, (6, 20)))
    with torch.no_grad():
        for batch in rows.split(2):
            model(input_ids=batch, past_key_values=seen, use_cache=True)
            cache: Any = DynamicCache()
            model(input_ids=batch, past_key_values=cache, use_cache=True)
            kept.append([part for layer in cache.layers for part in (layer.keys, layer.values)])
    for found, tensors in zip(seen.amax(), zip(*kept, strict=True), strict=True):
        expected = torch.cat(tensors).abs().amax(dim=(0, 2))
        np.testing.assert_allclose(found, expected.numpy(), rtol=1e-5)


def test_what_cannot_be_calibrated() -> None:
    with pytest.raises(UnsupportedModelError, match="takes no cache"):
        ObservedCache().amax()
    cache = ObservedCache()
    cache.update(torch.ones(1, 2, 3, 4), torch.full((1, 2, 3, 4), torch.nan), 0)
    with pytest.raises(CheckpointError, match="the values of layer 0 are not finite"):
        cache.amax()


# Graphs and engines


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_an_engine_computes_what_the_model_does_with_a_rounded_cache(hf: Path, kv_caches: Path, name: str) -> None:
    """Last bits move a few codes by one."""
    model, rounding = model_of(hf / "target"), stored_in(kv_caches / name)
    found = engine_logits(kv_caches / "engines" / name)
    exact, expected = model_logits(model), model_logits(model, rounding)
    cost = np.abs(expected - exact).mean()
    assert cost > 0
    assert np.abs(found - expected).mean() < cost / 20
    assert cost < 0.05 * np.abs(exact).max(), "and it is close to the model itself"
    for part in (0, 1):  # Of keys, of values: with factors of other channels it is another model.
        wrong = list(rounding.tensors)
        wrong[part] = wrong[part]._replace(factors=wrong[part].factors[:, ::-1] * np.float32(0.25))
        assert np.abs(found - model_logits(model, CacheRounding(rounding.dtype, tuple(wrong)))).mean() > cost / 2


def test_config_and_memory_follow_the_caches_type(kv_caches: Path, onnx: Path) -> None:
    rounded, whole = (open_checkpoint(directory).graph for directory in (kv_caches / "fp8", onnx / "target"))
    assert (rounded.kv_cache_dtype, whole.kv_cache_dtype) == ("float8_e4m3fn", None)
    assert whole.cache_bytes(2, 64) == 4 * rounded.cache_bytes(2, 64)
    assert re.search(r"KV cache +float8_e4m3fn", describe(kv_caches / "fp8", False))


def double_a_factor(model: ir.Model) -> None:
    """In one place of the three: what is divided by it, or multiplied."""
    quantize = cache_updates(model)[1].quantize
    assert quantize.inputs[0] is not None
    divide = quantize.inputs[0].producer()
    assert divide is not None and divide.inputs[1] is not None and divide.inputs[1].const_value is not None
    factors = np.array(divide.inputs[1].const_value.numpy())
    factors[0, 0, 0] *= 1.5
    divide.replace_input_with(1, graphs.initializer(model.graph, "wrong", ir.Tensor(factors, name="wrong")))


def test_convert_sees_a_wrong_factor(hf: Path, kv_caches: Path, tmp_path: Path) -> None:
    model, info = model_of(hf / "target"), open_checkpoint(kv_caches / "int8").graph
    reference = reference_logits(model, info.vocab_size, 64)
    assert compare(kv_caches / "int8" / GRAPH_NAME, info, [reference]) < 1e-4
    with pytest.raises(VerificationError, match="disagree"):
        compare(changed_graph(kv_caches / "int8", tmp_path / "wrong", double_a_factor), info, [reference])


def see_new_rows_unrounded(model: ir.Model) -> None:
    """Attention sees a pass's own keys and values as they were before rounding."""
    write_indices = next(value for value in model.graph.inputs if value.name == "write_indices")
    for rounding, scatter, readers in cache_updates(model):
        x = rounding.inputs[0]
        assert x is not None
        for reader in readers:
            uses = list(reader.outputs[0].uses())
            attributes = {given.name: given.value for given in scatter.attributes.values()}
            mixed = ir.node("TensorScatter", [reader.outputs[0], x, write_indices], attributes)
            mixed.outputs[0].name, mixed.outputs[0].type = f"{reader.name}.mixed", reader.outputs[0].type
            model.graph.insert_after(reader, mixed)
            for use in uses:
                use.node.replace_input_with(use.idx, mixed.outputs[0])


def test_a_text_has_the_same_bits_however_it_is_read(kv_caches: Path, tmp_path: Path) -> None:
    """Because a pass sees its own keys and values rounded too. Otherwise they are others in later passes."""
    for name in ("int8", "fp8"):
        engine = kv_caches / "engines" / name
        assert open_engine(engine).exact_on
        whole = engine_logits(engine)
        assert engine_logits(engine, (7, 2, 20, 11)).tobytes() == whole.tobytes()
    other = in_floats(kv_caches / "int8", tmp_path / "unrounded", see_new_rows_unrounded)
    with pytest.raises(BuildError, match="a token's bits depend on what is computed beside it"):
        make_engine(other, tmp_path / "engine", **SIZES)


@pytest.fixture(scope="module")
def wide_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ONNX checkpoint ``plain`` of a model whose heads can be packed, and ``int8`` of one with a rounded cache."""
    root = tmp_path_factory.mktemp("wide_heads")
    hf = save_checkpoint(root / "hf", "qwen3", dtype=torch.bfloat16)
    make_onnx(hf, root / "plain")
    make_onnx(hf, root / "int8", kv_cache_dtype="int8", texts=TextOptions(size=8, length=32))
    return root


@pytest.mark.parametrize(
    ("form", "bits", "of_a_pair", "named", "most"),
    [
        ("float16", 16, 32, "float16", 1e-3),
        ("auto", 16, 32, "float16", 1e-3),
        ("int8", 8, 17, "8 and 8 bits", 0.02),
        ("int4", 4, 13, "8 and 4 bits", 0.2),
    ],
)
def test_own_attention_packs_keys_and_values(
    wide_heads: Path, form: str, bits: int, of_a_pair: int, named: str, most: float, tmp_path: Path
) -> None:
    """of_a_pair: bits that a number of a key and one of a value take. most: what is lost, as a share of logits."""
    plain = make_engine(wide_heads / "plain", tmp_path / "plain", kv_cache_dtype="float32", **SIZES)
    packed = make_engine(wide_heads / "plain", tmp_path / "packed", kv_cache_dtype=form, **SIZES)
    graph = open_engine(packed).graph
    assert (graph.kv_cache_dtype, graph.value_bits) == ("uint8", bits)
    assert graph.cache_bytes(2, 64) == open_engine(plain).graph.cache_bytes(2, 64) * of_a_pair / 64
    assert f" in {named} for 4 rows" in describe(packed, False)
    expected, found = engine_logits(plain), engine_logits(packed)
    assert most / 200 < np.abs(found - expected).mean() / np.abs(expected).mean() < most
    assert engine_logits(packed, (7, 2, 20, 11)).tobytes() == found.tobytes()
    assert open_engine(packed).exact_on
    prompts = [[5, 9, 200], list(range(30, 70)), list(range(30, 77))]
    verdict = verify(packed, plain, prompts, SamplingParams(), DraftTargetConfig(3), 0.1)
    assert verdict.good or bits == 16, "whose drafts are all accepted, which proves nothing"
    assert verdict.parts[0].identical == verdict.parts[0].texts == len(prompts)


def test_texts_are_the_targets_own(wide_heads: Path, engines: Path, tmp_path: Path) -> None:
    """Byte for byte, for any draft; and with a reused prefix as without."""
    target = make_engine(wide_heads / "plain", tmp_path / "target", kv_cache_dtype="int8", **SIZES)
    prompts = [[5, 9, 200], list(range(30, 70)), list(range(30, 77))]
    verdict = verify(target, engines / "draft", prompts, SamplingParams(), DraftTargetConfig(3), 0.1)
    assert verdict.good
    assert verdict.parts[0].identical == verdict.parts[0].texts == len(prompts)
    outputs = []
    for reuse in (True, False):
        with SpeculativeDecoder.open(target, engines / "draft", DraftTargetConfig(reuse_blocks=reuse)) as decoder:
            requests = [Request(prompt, SamplingParams(), 12) for prompt in (*prompts, *prompts)]
            outputs.append([decode(decoder, [request])[0] for request in requests])
        assert bool(sum(request.stats.cached for request in requests)) == reuse
    assert outputs[0] == outputs[1]


def test_a_rounded_checkpoint_is_packed_in_8_bits(wide_heads: Path, tmp_path: Path) -> None:
    """Its own factors and codes are left out: the engine is that of the checkpoint without them."""
    found = make_engine(wide_heads / "int8", tmp_path / "found", **SIZES)
    expected = make_engine(wide_heads / "plain", tmp_path / "expected", kv_cache_dtype="int8", **SIZES)
    assert engine_logits(found).tobytes() == engine_logits(expected).tobytes()


def test_what_cannot_be_packed(onnx: Path, kv_caches: Path, tmp_path: Path) -> None:
    target = onnx / "target"  # Whose heads have 16 numbers.
    for checkpoint, form in ((target, "int8"), (kv_caches / "int8", "auto"), (kv_caches / "fp8", "auto")):
        with pytest.raises(BuildError, match="heads whose width is no multiple of 32"):
            make_engine(checkpoint, tmp_path / "engine", kv_cache_dtype=form)
    with pytest.raises(BackendError, match="--kv_cache_dtype int4: is for engines of onnxruntime for the CPU"):
        make_engine(target, tmp_path / "engine", kv_cache_dtype="int4", backend="tensorrt_rtx")
    assert not (tmp_path / "engine").exists()


@pytest.mark.quick("gpt_oss")
@pytest.mark.parametrize(
    ("family", "wide"),
    [
        pytest.param("gemma2", {}, id="gemma2"),
        pytest.param("gpt_oss", {"head_dim": 32}, id="gpt_oss"),
        pytest.param("gpt2", {"n_head": 2}, id="gpt2"),
    ],
)
def test_other_attention_in_16_bits(family: str, wide: dict[str, Any], text: TextOptions, tmp_path: Path) -> None:
    """Soft caps, sinks, windows, and no rotary embedding; ``convert`` compares the graph with the model."""
    hf = save_checkpoint(tmp_path / "hf", family, dtype=torch.bfloat16, **wide)
    checkpoint = make_onnx(hf, tmp_path / "onnx", kv_cache_dtype="fp8", texts=text)
    assert open_checkpoint(checkpoint).max_logit_difference is not None
    engine = make_engine(checkpoint, tmp_path / "engine", **SIZES)
    plain = make_onnx(hf, tmp_path / "plain", verify=False)
    expected = make_engine(plain, tmp_path / "expected", kv_cache_dtype="int8", **SIZES)
    whole = engine_logits(engine)
    assert engine_logits(expected).tobytes() == whole.tobytes()
    assert engine_logits(engine, (7, 2, 20, 11)).tobytes() == whole.tobytes()
    if family != "gpt2":
        with pytest.raises(BuildError, match=r"is spelled out \(soft-capped scores or sinks\), and TensorRT takes"):
            make_engine(checkpoint, tmp_path / "plan", backend="tensorrt_rtx")


# Checkpoints with scales


@pytest.mark.quick("fp8")
@pytest.mark.parametrize("name", ["fp8", "int8"])
def test_scales_of_a_checkpoint_are_taken_over(hf: Path, text: TextOptions, tmp_path: Path, name: str) -> None:
    source = tmp_path / "hf"
    report = quantize(QuantizeOptions(str(hf / "target"), source, kv_cache_dtype=name, texts=text), quiet())
    assert report["kv_cache_dtype"] == name
    assert report["quality"]["mean_kl"] > 0
    scheme = json.loads((source / "config.json").read_text())["quantization_config"]["kv_cache_scheme"]
    assert scheme["strategy"] == {"fp8": "tensor", "int8": "attn_head"}[name]
    stored = load_file(source / "model.safetensors")
    expected = [stored[f"model.layers.{layer}.self_attn.{kind}_scale"] for layer in (0, 1) for kind in "kv"]
    assert [list(scale.shape) for scale in expected] == [{"fp8": [1], "int8": [2, 1, 1]}[name]] * 4
    checkpoint = make_onnx(source, tmp_path / "onnx", kv_cache_dtype=name)
    config = open_checkpoint(checkpoint)
    assert "8-bit cache: scales as in the checkpoint" in config.provenance.notes
    for (quantize_node, _, _), scale in zip(cache_updates(ir.load(checkpoint / GRAPH_NAME)), expected, strict=True):
        constant = quantize_node.inputs[1]
        assert constant is not None and constant.const_value is not None
        step = constant.const_value.numpy()
        if name == "int8":
            divide = quantize_node.inputs[0].producer()  # type: ignore[union-attr]
            step = step * divide.inputs[1].const_value.numpy()[:, :, :1]  # type: ignore[union-attr]
        np.testing.assert_allclose(np.broadcast_to(step, scale.shape), scale.numpy(), rtol=1e-6)
    plain = open_checkpoint(make_onnx(source, tmp_path / "plain", verify=False))
    assert plain.graph.kv_cache_dtype is None
    assert f"made for a cache in {name}; --kv_cache_dtype {name} stores it so" in plain.provenance.notes
    del stored["model.layers.1.self_attn.v_scale"]
    save_file(stored, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match="layer 1 has no v_scale"):
        make_onnx(source, tmp_path / "missing", kv_cache_dtype=name)
    assert not (tmp_path / "missing").exists()


# Bad input


def test_bad_input_is_one_line(hf: Path, tmp_path: Path) -> None:
    short = tmp_path / "short.txt"
    short.write_text("a few words")
    arguments = ("convert", "--model_dir", hf / "target", "--output_dir", tmp_path / "out", "--kv_cache_dtype")
    line = error_line(build(*arguments, "int8", "--calib_dataset", short))
    says(line, "tokens, and at least two rows of --calib_max_seq_length", "are needed")
    assert "'int4' is not one of 'auto', 'int8', 'fp8'" in build(*arguments, "int4").stderr
    with pytest.raises(BuildConfigError, match="--kv_cache_dtype int4: expected auto, int8, fp8"):
        make_onnx(hf / "target", tmp_path / "out", kv_cache_dtype="int4")
    assert not (tmp_path / "out").exists()


def test_cuda_engines_of_onnxruntime_have_none(kv_caches: Path, tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="keys and values in int8: engines of ONNX Runtime for CUDA have no 8-bit"):
        make_engine(kv_caches / "int8", tmp_path / "engine", backend="onnxruntime", device="cuda")


# TensorRT


@pytest.mark.parametrize(("name", "capabilities", "refused"), [("int8", [80, 86, 89, 120], 0), ("fp8", [89, 120], 86)])
def test_tensorrt_compiles_it_for_the_gpus_that_have_it(
    kv_caches: Path, tmp_path: Path, name: str, capabilities: list[int], refused: int
) -> None:
    """The plan reads the cache and gives new keys and values of their own."""
    wanted = ",".join(map(str, capabilities))
    plan = make_engine(
        kv_caches / name, tmp_path / "plan", backend="tensorrt_rtx", compute_capabilities=wanted, max_batch_size=2
    )
    config = open_engine(plan)
    kind = open_checkpoint(kv_caches / name).graph.kv_cache_dtype
    tensors = {tensor.name: (tensor.dtype, tensor.shape, tensor.aliases) for tensor in config.io}
    length = config.build_config.cache_length
    assert length % 16 == 0
    assert tensors["past_key_values.1.value"] == (kind, ["batch", 2, length, 16], None)
    assert tensors["present.1.value"] == (kind, ["batch", 2, "sequence", 16], None)
    assert not config.writes_cache
    assert config.new_positions == 2 * config.build_config.max_input_len
    if refused:
        with pytest.raises(BuildError, match=f"--compute_capabilities {refused}: weights or the cache are float8"):
            make_engine(kv_caches / name, tmp_path / "old", backend="tensorrt_rtx", compute_capabilities=str(refused))
