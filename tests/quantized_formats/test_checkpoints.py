"""Whole checkpoints that come quantized: converted, compared, compiled."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import onnx_ir as ir
import pytest
from safetensors.torch import load_file, save_file

from specbuild.artifacts.onnx_checkpoint import open_checkpoint
from specrun.engine_dir.config import open_engine
from specrun.errors import BuildConfigError, BuildError, CheckpointError
from tests.helpers.engines import engine_graph, make_engine, make_onnx
from tests.helpers.families import save_checkpoint
from tests.helpers.quantized_checkpoints import (
    FORMATS,
    GROUP,
    quantized_checkpoint,
)


@pytest.fixture(scope="module", params=list(FORMATS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The method, and an ONNX checkpoint of a quantized one; converting compares it with the dequantized model."""
    directory = tmp_path_factory.mktemp(request.param)
    quantized_checkpoint(directory / "hf", request.param)
    return request.param, make_onnx(directory / "hf", directory / "onnx")


def test_weights_stay_packed_and_the_graph_is_the_dequantized_model(checkpoint: tuple[str, Path]) -> None:
    method, directory = checkpoint
    config = open_checkpoint(directory)
    assert config.max_logit_difference is not None
    assert config.graph.quantized is not None
    assert config.graph.quantized.source == method
    assert config.graph.quantized.forms == {f"{FORMATS[method][2]} in groups of {GROUP}": 14} or method == "fp8"
    stored = Counter(value.dtype for value in ir.load(directory / "model.onnx").graph.initializers.values())
    codes = {"fp8": ir.DataType.FLOAT8E4M3FN, "gptq": ir.DataType.UINT4}[method]
    assert stored[codes] >= 14


def test_processors_multiply_by_packed_weights(checkpoint: tuple[str, Path], tmp_path: Path) -> None:
    _, directory = checkpoint
    engine = make_engine(directory, tmp_path / "engine", backend="onnxruntime", max_draft_len=2)
    operators = Counter(node.op_type for node in engine_graph(engine))
    assert operators["QuantizedMatMul"] == 2 * 4, operators  # Those of one input are one.
    assert "DequantizeLinear" not in operators, operators


def test_tensorrt_keeps_them_packed(checkpoint: tuple[str, Path], tmp_path: Path) -> None:
    _, directory = checkpoint
    engine = make_engine(directory, tmp_path / "plan", backend="tensorrt_rtx", max_draft_len=2)
    assert "12.0" in open_engine(engine).backend.compute_capabilities


def test_dequantized_weights_are_dense(tmp_path: Path) -> None:
    source = quantized_checkpoint(tmp_path / "hf", "fp8")
    config = open_checkpoint(make_onnx(source, tmp_path / "onnx", dequantize=True))
    assert config.graph.quantized is None
    with pytest.raises(BuildConfigError, match="quantized already"):
        make_onnx(source, tmp_path / "again", qformat="int8")


def test_a_layer_that_is_dense_against_the_configuration_is_refused(tmp_path: Path) -> None:
    source = quantized_checkpoint(tmp_path / "hf", "fp8")
    tensors = load_file(source / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight_scale_inv"]
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model.layers.1.mlp.up_proj"):
        make_onnx(source, tmp_path / "onnx")


@pytest.mark.quick("nvfp4_wo")
@pytest.mark.parametrize(
    ("qformat", "first"),
    [("int8", "8.0"), ("int8_wo", "8.0"), ("int4", "8.0"), ("fp8_wo", "8.9"), ("nvfp4_wo", "12.0")],
)
def test_tensorrt_compiles_every_format_for_the_gpus_that_have_it(qformat: str, first: str, tmp_path: Path) -> None:
    source = save_checkpoint(tmp_path / "hf", "llama3", num_hidden_layers=1, intermediate_size=128)
    onnx = make_onnx(source, tmp_path / "onnx", qformat=qformat, dtype="bfloat16", verify=False)
    plan = make_engine(onnx, tmp_path / "plan", backend="tensorrt_rtx", max_draft_len=2)
    assert open_engine(plan).backend.compute_capabilities[0] == first
    if first != "8.0":
        with pytest.raises(BuildError, match=r"--compute_capabilities 80: weights or the cache are float"):
            make_engine(onnx, tmp_path / "old", backend="tensorrt_rtx", compute_capabilities="80,120")
        assert not (tmp_path / "old").exists()
