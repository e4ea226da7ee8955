"""TensorRT-RTX compiles models of many layers: what its parser does with names shows only there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import onnx_ir as ir
import pytest
import torch

from specbuild.compilers.tensorrt.formats import make_names_unique
from specbuild.quantization.calibration_data import TextOptions
from specrun.engine_dir.config import EngineConfig, open_engine
from tests.helpers.engines import make_engine, make_onnx
from tests.helpers.families import save_checkpoint
from tests.helpers.heads.made import save_head

pytestmark = pytest.mark.slow("plans compile: compilers/test_tensorrt.py, quantization/test_kv_cache.py")

LAYERS = 8
SMALL: dict[str, Any] = {
    "num_hidden_layers": LAYERS,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
EXPERTS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2}
PLAN: dict[str, Any] = {
    "backend": "tensorrt_rtx",
    "compute_capabilities": (120,),
    "max_input_len": 16,
    "max_seq_len": 32,
    "max_draft_len": 2,
}


def convert(directory: Path, family: str, **options: Any) -> Path:
    sizes = {**SMALL, **(EXPERTS if family == "mixtral" else {})}
    hf = save_checkpoint(directory / "hf", family, dtype=torch.bfloat16, **sizes)
    return make_onnx(hf, directory / "onnx", verify=False, texts=TextOptions(size=2, length=16), **options)


def compiled(onnx_dir: Path, output: Path, **options: Any) -> EngineConfig:
    config = open_engine(make_engine(onnx_dir, output, **PLAN, **options))
    assert len(config.graph.caches) == 2 * LAYERS
    return config


@pytest.mark.parametrize(
    ("family", "qformat", "cache", "rows"),
    [("llama3", "auto", "int8", 1), ("llama3", "auto", "fp8", 4), ("mixtral", "int4", "int8", 4)],
)
def test_caches_in_8_bits(family: str, qformat: str, cache: str, rows: int, tmp_path: Path) -> None:
    onnx_dir = convert(tmp_path, family, kv_cache_dtype=cache, qformat=qformat)
    config = compiled(onnx_dir, tmp_path / "plan", max_batch_size=rows)
    assert config.graph.kv_cache_dtype == {"int8": "int8", "fp8": "float8_e4m3fn"}[cache]
    assert not config.writes_cache


def test_features(tmp_path: Path) -> None:
    target = save_checkpoint(tmp_path / "target", "llama3", num_hidden_layers=LAYERS, dtype=torch.bfloat16)
    head = save_head(tmp_path / "head", "speculators")
    onnx_dir = make_onnx(target, tmp_path / "onnx", head=str(head), verify=False)
    assert compiled(onnx_dir, tmp_path / "plan").graph.features is not None


def test_no_name_is_one_that_the_parser_gives() -> None:
    """It numbers what it adds: NAME_7."""
    x = ir.Value(name="x")
    first = ir.node("Neg", [x], name="neg")
    second = ir.node("Neg", [first.outputs[0]], name="neg_7")
    model = ir.Model(ir.Graph([x], [second.outputs[0]], nodes=[first, second], opset_imports={"": 24}), ir_version=10)
    make_names_unique(model)
    names = [str(node.name) for node in model.graph]
    assert len(set(names)) == len(names)
    assert not any(re.search(r"_\d+$", name) for name in names)
