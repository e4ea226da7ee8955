"""Engines whose products are specrun's own: exact to the bit in every shape; where the operators are missing, said."""

from __future__ import annotations

import ctypes
import shutil
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file

from scripts.benchmarks.roofline import work_of
from scripts.fuzz_bit_exact import fuzz
from specrun import EngineDirError, SpeculativeDecoder, cpu_operators
from specrun.backends import open_host_backend
from specrun.config import DraftTargetConfig
from specrun.engine_dir.config import open_engine
from specrun.engine_dir.contract import UNUSED_TOKEN
from specrun.errors import BackendError
from specrun.request.options import RequestOptions
from specrun.request.request import Request
from specrun.runners.host_runner import ModelRunner
from specrun.sampling.sampler import SamplingParams
from tests.helpers.engines import engine_graph, make_engine, make_onnx
from tests.helpers.families import save_checkpoint
from tests.helpers.quantized_onnx import quantized

SIZES = {"max_input_len": 48, "max_batch_size": 4, "max_draft_len": 6}


@pytest.mark.parametrize(("form", "block"), [("float32", 0), ("int8", 0), ("int4", 32), ("int4", 128)])
def test_every_shape_of_a_pass_gives_the_same_text(
    form: str, block: int, engines: Path, onnx: Path, tmp_path: Path
) -> None:
    """Without padding, in whatever way requests meet: nor does a log-probability differ by a bit."""
    is_float, has_codes = form == "float32", (form, block) == ("int4", 128)
    output = tmp_path / "onnx"
    checkpoint = onnx / "target" if is_float else quantized(onnx / "target", output, form, block, embedding=has_codes)
    engine = make_engine(checkpoint, tmp_path / "engine", **SIZES)
    config = open_engine(engine)
    operators = Counter(node.op_type for node in engine_graph(engine))
    assert operators["FloatMatMul" if is_float else "QuantizedMatMul"] == 2 * 4 + 1  # Those of one input are one.
    assert not {"DequantizeLinear", "QuantizeLinear", "MatMul", "MatMulNBits"} & operators.keys()
    assert operators["CachedAttention"] == 2
    assert not {"Reshape", "QuickGelu", "Sigmoid", "RMSNormalization", "GatherElements", "Expand"} & operators.keys()
    assert not {"Sin", "Cos", "Range"} & operators.keys()
    assert ("Where" in operators) is not has_codes  # It marks unused tokens; an embedding's scales do so themselves.
    assert config.backend.needs_cpu_operators == cpu_operators.VERSION
    assert config.exact_on
    tally = fuzz(engine, [engines / "draft", engine, engines / "target"], 24, seed=1)
    assert (tally.different_texts, tally.different_logprobs) == (0, 0)
    assert 0 < tally.accepted < tally.evaluated


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", ["auto", "int8", "int8_wo", "int4"])
def test_checkpoints_in_16_bits_have_our_products(form: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Their dtype rounds all constants, and those by which inputs are rounded too. Embeddings stay in 16 bits."""
    checkpoint = save_checkpoint(tmp_path / "hf", "qwen2", dtype=dtype)
    onnx_dir = make_onnx(checkpoint, tmp_path / "onnx", qformat=form, verify=False)
    engine = make_engine(onnx_dir, tmp_path / "engine", **SIZES)
    assert open_engine(engine).backend.skips_unused_tokens
    operators = Counter(node.op_type for node in engine_graph(engine))
    assert operators["FloatMatMul" if form == "auto" else "QuantizedMatMul"] == 2 * 4 + 1
    others = {"DequantizeLinear", "QuantizeLinear", "MatMul", "Div", "ReduceMax", "RMSNormalization"}
    assert not others & operators.keys()


@pytest.mark.parametrize(("form", "embedding"), [("float32", False), ("int8", False), ("int8", True), ("int4", True)])
def test_unused_tokens_change_nothing(form: str, embedding: bool, onnx: Path, tmp_path: Path) -> None:
    """Neither logits nor caches of other tokens, however many are unused; and their products are left out."""
    checkpoint, output = onnx / "target", tmp_path / "onnx"
    if form != "float32":
        checkpoint = quantized(checkpoint, output, form, 32, embedding)
    engine = make_engine(checkpoint, tmp_path / "engine", **SIZES)
    config = open_engine(engine)
    assert config.backend.skips_unused_tokens
    ids, lens = np.random.default_rng(0).integers(3, 90, (3, 6)), (6, 2, 4)

    def read(used: Sequence[int]) -> list[npt.NDArray[np.float32]]:
        with closing(open_host_backend(engine, config, 0)) as backend:
            backend.resize(3, 64, 0)
            step = backend.bind(0, 3, 6, 6)
            step.input_ids[...], step.write_indices[...], step.logits_indices[...] = ids, 5, range(6)
            for row, count in enumerate(used):
                step.input_ids[row, count:] = UNUSED_TOKEN
            step.run()
            if used == lens:
                assert np.isnan(step.logits[1, 2:, 0]).all(), "no product was computed"
            logits = [step.logits[row, :count].copy() for row, count in enumerate(lens)]
            caches = backend.cache.part(0, 3)
            return logits + [cache[row, :, : 5 + count].copy() for cache in caches for row, count in enumerate(lens)]

    for one, other in zip(read(lens), read((6, 6, 6)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("form", ["float32", "int4"])
def test_what_earlier_texts_have_left_in_the_cache_changes_nothing(form: str, onnx: Path, tmp_path: Path) -> None:
    """Rows are not zeroed: behind their texts may stand what is no number."""
    checkpoint = onnx / "target" if form == "float32" else quantized(onnx / "target", tmp_path / "onnx", form, 32)
    engine = make_engine(checkpoint, tmp_path / "engine", **SIZES)
    prompts = [[*range(3, 3 + length)] for length in (1, 5, 20, 41)]

    def texts(fill: float | None) -> list[tuple[list[int], list[float]]]:
        with SpeculativeDecoder.open(engine, engine, DraftTargetConfig(3, reuse_blocks=False)) as decoder:
            first = decoder.generate(prompts[::-1], max_output_len=30, logprobs=0)
            runner = decoder.scheduler.round.host_target
            assert runner is not None
            if fill is not None:
                for tensor in runner.backend.cache.part(0, 4):
                    tensor[...] = fill
            requests = [*first, *decoder.generate(prompts, max_output_len=40, logprobs=0)]
        return [(one.output, [each.logprob.logprob for each in one.token_outputs if each.logprob]) for one in requests]

    expected = texts(None)
    assert all(len(output) == len(logprobs) > 20 for output, logprobs in expected)
    assert texts(np.nan) == texts(np.inf) == expected


def test_passes_stay_bound_from_text_to_text(onnx: Path, tmp_path: Path) -> None:
    """Where the next texts need as many rows and no less than half of their length."""
    engine = make_engine(onnx / "target", tmp_path / "engine", max_batch_size=4)
    config = open_engine(engine)
    with closing(open_host_backend(engine, config, 0)) as backend:
        runner = ModelRunner(backend)
        found = []
        for rows, length in [(2, 128), (1, 200), (2, 100), (2, 64), (1, 64), (3, 64), (2, 130)]:
            runner.reserve(rows, length)
            found.append((backend.cache.rows, backend.cache.length))
    assert found == [(2, 128), (1, 256), (2, 128), (2, 128), (1, 64), (3, 64), (2, 192)]
    assert runner.rows.lengths == [0, 0]


@pytest.mark.quick("deepseek_v2", "qwen3_moe")
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_5", "deepseek_v2"])
def test_where_other_tokens_could_see_an_unused_one_it_is_a_token_like_others(family: str, tmp_path: Path) -> None:
    """Experts are chosen for all tokens, states read all of them, and latent attention is ONNX Runtime's."""
    checkpoint = make_onnx(save_checkpoint(tmp_path / "hf", family), tmp_path / "onnx", verify=False)
    assert not open_engine(make_engine(checkpoint, tmp_path / "engine")).backend.skips_unused_tokens


@pytest.mark.quick("int4-5")
@pytest.mark.parametrize(("form", "bits"), [("float32", 32), ("int8", 8), ("int4", 5)])
def test_what_another_layer_adds_to_a_pass(form: str, bits: int, tmp_path: Path) -> None:
    """Five nodes, and its weights once, whatever the machine. Here 32 weights of 4 bits have a scale in float32."""
    works = []
    for layers in (2, 3):
        hf = save_checkpoint(tmp_path / f"hf{layers}", "llama3", num_hidden_layers=layers, hidden_size=128)
        checkpoint = make_onnx(hf, tmp_path / f"onnx{layers}", verify=False)
        if form != "float32":
            checkpoint = quantized(checkpoint, tmp_path / f"{form}{layers}", form, 32)
        works.append(work_of(engine_graph(make_engine(checkpoint, tmp_path / f"engine{layers}"))))
    fewer, more = works
    added = Counter(more.nodes) - Counter(fewer.nodes)
    products = "FloatMatMul" if form == "float32" else "QuantizedMatMul"
    assert added == {products: 4, "CachedAttention": 1}
    weights = more.products - fewer.products
    scales = 4 * 128 * 8 if form == "int8" else 0  # One for each column.
    assert 0 <= more.weight_bytes - fewer.weight_bytes - weights * bits / 8 <= 4 * 2 * 128 + scales, "norms and scales"


@pytest.fixture
def uncompiled(tmp_path: Path) -> Iterator[Path]:
    """As where no compiler was when the package was installed. The directory is where the operators would be."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_operators, "__file__", str(tmp_path / "__init__.py"))
        cpu_operators.library.cache_clear()
        assert not cpu_operators.is_available()
        yield tmp_path
    cpu_operators.library.cache_clear()


def test_without_the_operators_engines_are_neither_built_nor_opened(
    engines: Path, uncompiled: Path, onnx: Path, tmp_path: Path
) -> None:
    with pytest.raises(BackendError, match=r"engines for the CPU need specrun's own operators.*C\+\+ compiler"):
        make_engine(onnx / "target", tmp_path / "engine", **SIZES)
    assert not (tmp_path / "engine").exists()
    with pytest.raises(EngineDirError, match=r"needs specrun's own CPU operators \(version .*C\+\+ compiler"):
        SpeculativeDecoder.open(engines / "target")


def test_a_library_of_another_version_is_none(uncompiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = next(Path(__file__).parents[2].glob("specrun/cpu_operators/_compiled*"))
    shutil.copyfile(compiled, uncompiled / compiled.name)
    assert ctypes.CDLL(str(compiled)).specrun_operators_version() == cpu_operators.VERSION
    cpu_operators.library.cache_clear()
    assert cpu_operators.is_available()
    cpu_operators.library.cache_clear()
    monkeypatch.setattr(cpu_operators, "VERSION", cpu_operators.VERSION + 1)
    assert not cpu_operators.is_available(1)


def test_logits_that_are_not_numbers_are_seen_through_a_constraint(tmp_path: Path) -> None:
    """Products write the first number alone of a row of NaN, and a stop id that must not come yet hides that one."""
    hf = save_checkpoint(tmp_path / "hf", "llama3")
    weights = load_file(hf / "model.safetensors")
    embeddings = weights["model.embed_tokens.weight"]
    embeddings[:, 0] = 0
    embeddings[7, 0] = 1000  # Of this token alone, a layer's products overflow.
    for name, weight in weights.items():
        if "o_proj" in name or "down_proj" in name:
            weight[0] = 0
        elif "layers.0.mlp" in name:
            weight[:, 0] = 1e30
    save_file(weights, hf / "model.safetensors", {"format": "pt"})
    engine = make_engine(make_onnx(hf, tmp_path / "onnx", verify=False), tmp_path / "engine", **SIZES)
    with SpeculativeDecoder.open(engine) as decoder:
        sound, spoiled = (
            Request(
                [first],
                SamplingParams(),
                4,
                stop_ids=frozenset([0]),
                options=RequestOptions(min_output_len=4, reuse_blocks=False),
            )
            for first in (5, 7)
        )
        list(decoder.run([sound]))  # Its logits lie in memory that the other one uses.
        list(decoder.run([spoiled]))
    assert len(sound.output) == 4
    assert isinstance(spoiled.error, BackendError) and "not numbers" in str(spoiled.error)
    assert not spoiled.output
