"""Families with recurrent layers: parity with Hugging Face, bits that no pass changes, real TensorRT-RTX plans."""

from __future__ import annotations

import math
from pathlib import Path

import onnx
import pytest
from torch.export import ExportedProgram

from specbuild.artifacts.onnx_checkpoint import open_checkpoint
from specbuild.export.recurrent import SWAPS
from specbuild.graph import recurrent
from specbuild.quantization.calibration_data import TextOptions
from specrun.engine_dir.config import GRAPH_NAME, open_engine
from specrun.engine_dir.contract import KEEP_INDICES, STATE_INDICES, WRITE_INDICES
from specrun.errors import UnsupportedModelError, VerificationError
from tests.helpers.engines import make_engine, make_onnx
from tests.helpers.families import RECURRENT, save_checkpoint
from tests.helpers.ranks import shard_difference


@pytest.mark.quick("qwen3_5", "nemotron_h")
@pytest.mark.parametrize("family", RECURRENT)
def test_family(family: str, tmp_path: Path, decomposed: list[ExportedProgram]) -> None:
    """``convert`` compares with transformers, over passes that take tokens back, in standard operators."""
    onnx_dir = make_onnx(save_checkpoint(tmp_path / "hf", family), tmp_path / "onnx")
    assert not decomposed
    config = open_checkpoint(onnx_dir)
    assert config.max_logit_difference is not None and config.max_logit_difference < 1e-5
    assert config.graph.states
    model = onnx.load(onnx_dir / GRAPH_NAME, load_external_data=False)
    assert {opset.domain for opset in model.opset_import} == {"", recurrent.DOMAIN}
    assert {node.domain for function in model.functions for node in function.node} == {""}
    engine = open_engine(make_engine(onnx_dir, tmp_path / "ort", max_draft_len=4))
    assert engine.exact_on
    names = {tensor.name for tensor in engine.io if tensor.kind == "input"}
    assert names >= {WRITE_INDICES, STATE_INDICES, KEEP_INDICES, *(state.past_name for state in engine.graph.states)}
    assert engine.graph.state_bytes(2) == 2 * engine.graph.state_bytes(1) > 0
    assert shard_difference(onnx_dir, 2) < 1e-5
    plan = open_engine(make_engine(onnx_dir, tmp_path / "rtx", backend="tensorrt_rtx", max_draft_len=4))
    assert {tensor.name for tensor in plan.io if tensor.kind == "input"} == names
    tensors = {tensor.name: tensor for tensor in plan.io}
    for state in plan.graph.states:
        shape = state.row_shape(plan.graph.replays)
        assert 4 * math.prod(shape) % 256 == 0, "specrun refuses it on GPUs"
        for name in (state.past_name, state.present_name):
            assert (tensors[name].shape, tensors[name].dtype) == (["batch", *shape], "float32")
            assert tensors[name].aliases is None


@pytest.mark.slow("test_family, in float32")
def test_in_16_bits(tmp_path: Path) -> None:
    """States stay float32, as transformers computes them."""
    onnx_dir = make_onnx(save_checkpoint(tmp_path / "hf", "olmo_hybrid"), tmp_path / "onnx", dtype="float16")
    config = open_checkpoint(onnx_dir)
    assert config.max_logit_difference is not None and config.max_logit_difference < 1e-2
    model = onnx.load(onnx_dir / GRAPH_NAME, load_external_data=False)
    kinds = {value.name: value.type.tensor_type.elem_type for value in model.graph.input}
    assert {kinds[state.past_name] for state in config.graph.states} == {onnx.TensorProto.FLOAT}
    make_engine(onnx_dir, tmp_path / "rtx", backend="tensorrt_rtx", max_draft_len=4)


@pytest.mark.quick("again")
@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("again = Where (slot_counts_all, past_inputs, nothing)", "again = Identity (past_inputs)"),
        ("kept_tokens = Less (tokens, kept_new_rows)", "kept_tokens = LessOrEqual (tokens, kept_new_rows)"),
        ("seen_place = Add (seen, replayed_rows)", "seen_place = Identity (seen)"),
        ("moved = Add (place, behind)", "moved = Identity (place)"),
    ],
)
def test_a_wrong_function_is_seen(right: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: rejected tokens stay, one too many stays, a window or inputs at other places."""
    for name in ("_ATTENTION", "_CONVOLUTION", "_END"):
        monkeypatch.setattr(recurrent, name, getattr(recurrent, name).replace(right, wrong))
    with pytest.raises(VerificationError):
        make_onnx(save_checkpoint(tmp_path / "hf", "olmo_hybrid"), tmp_path / "onnx")


def test_a_rule_that_nobody_knows_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before weights are read: a file of transformers that computes its states by functions of another name."""
    monkeypatch.delitem(SWAPS, "mamba2_chunk_scan")
    with pytest.raises(UnsupportedModelError, match="by a rule that is not known"):
        make_onnx(save_checkpoint(tmp_path / "hf", "bamba"), tmp_path / "onnx")


def test_an_8_bit_cache_is_refused(tmp_path: Path) -> None:
    checkpoint = save_checkpoint(tmp_path / "hf", "qwen3_5")
    with pytest.raises(UnsupportedModelError, match="--kv_cache_dtype int8: models with recurrent layers"):
        make_onnx(checkpoint, tmp_path / "onnx", kv_cache_dtype="int8", texts=TextOptions(size=2, length=32))
