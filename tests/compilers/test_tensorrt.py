"""What the TensorRT compiler refuses, checked with the real TensorRT-RTX builder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import pytest

from specbuild.artifacts.inspect import describe
from specbuild.compilers import choose
from specbuild.compilers.tensorrt.compile import _log
from specbuild.compilers.tensorrt.timing_cache import load_timings, save_timings
from specbuild.engine.config import engine_options
from specbuild.engine.dry_run import describe_plan
from specbuild.engine.plan import plan_engine
from specbuild.engine.size import weight_bytes
from specrun.engine_dir.config import GRAPH_NAME, PLAN_NAME, describe_file, open_engine
from specrun.errors import BackendError, BuildError
from tests.helpers.engines import make_engine, make_onnx
from tests.helpers.families import save_checkpoint


def edited(checkpoint: Path, output: Path, edit: Callable[[ir.Model], None]) -> Path:
    """A copy of an ONNX checkpoint directory whose graph was changed by ``edit``."""
    shutil.copytree(checkpoint, output)
    model = ir.load(output / GRAPH_NAME)
    edit(model)
    (output / GRAPH_NAME).write_bytes(ir.to_proto(model).SerializeToString())
    config = json.loads((output / "config.json").read_text())
    config["files"][GRAPH_NAME] = describe_file(output / GRAPH_NAME).model_dump()
    (output / "config.json").write_text(json.dumps(config))
    return output


def add_input(model: ir.Model) -> None:
    model.graph.inputs.append(ir.Value(name="extra", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([1])))


def ignore_the_logits_indices(model: ir.Model) -> None:
    """The graph chooses the position itself, so the contract's input is there but nothing reads it."""
    ids, _, indices = model.graph.inputs[:3]
    chosen = ir.node("ArgMin", [ids], {"axis": 1, "keepdims": 1})
    chosen.outputs[0].name = "chosen"
    model.graph.insert_before(model.graph[0], chosen)
    for use in list(indices.uses()):
        use.node.replace_input_with(use.idx, chosen.outputs[0])


def copy_the_cache(model: ir.Model) -> None:
    """The first present output is a copy, so it cannot share its past's memory."""
    present = next(value for value in model.graph.outputs if value.name == "present.0.key")
    copy = ir.node("Add", [present, present])
    copy.outputs[0].type, copy.outputs[0].shape = present.type, present.shape
    model.graph.append(copy)
    index = list(model.graph.outputs).index(present)
    present.name, copy.outputs[0].name = "scattered", "present.0.key"
    model.graph.outputs[index] = copy.outputs[0]


def unknown_operator(model: ir.Model) -> None:
    next(node for node in model.graph if node.op_type == "Attention").op_type = "Nonsense"


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (add_input, "'extra'"),
        (ignore_the_logits_indices, "logits_indices"),
        (copy_the_cache, "in place"),
        (unknown_operator, "Nonsense"),
    ],
)
def test_a_graph_outside_the_contract_is_an_error(
    onnx: Path, tmp_path: Path, edit: Callable[[ir.Model], None], said: str
) -> None:
    """An input that is unknown, one that nothing reads, a cache that is not updated in place, an unknown operator."""
    checkpoint = edited(onnx / "target", tmp_path / "onnx", edit)
    with pytest.raises(BuildError, match=said):
        make_engine(checkpoint, tmp_path / "plan", backend="tensorrt_rtx", max_draft_len=4)
    assert not (tmp_path / "plan").exists()


@pytest.mark.quick("float16-16-True")
@pytest.mark.parametrize(
    ("dtype", "head_dim", "fused"), [("float16", 16, True), ("bfloat16", 8, False), ("float16", 288, False)]
)
def test_attention_is_one_kernel_or_it_is_said(dtype: str, head_dim: int, fused: bool, tmp_path: Path) -> None:
    """TensorRT-RTX 1.7 has fused kernels for heads of 16 to 256."""
    checkpoint = save_checkpoint(tmp_path / "hf", "llama3", head_dim=head_dim)
    onnx_dir = make_onnx(checkpoint, tmp_path / "onnx", dtype=dtype, verify=False)
    plan = make_engine(onnx_dir, tmp_path / "plan", backend="tensorrt_rtx", max_draft_len=4)
    notes = open_engine(plan).provenance.notes
    said = f"TensorRT has no fused attention kernel for {dtype} and heads of {head_dim}"
    assert any(note.startswith(said) for note in notes) is not fused
    assert has_fused_attention(plan) is fused


def test_float32_attention_is_taken_apart_without_asking(onnx: Path, tmp_path: Path) -> None:
    plan = make_engine(onnx / "target", tmp_path / "plan", backend="tensorrt_rtx", max_draft_len=4)
    assert not has_fused_attention(plan)
    assert not any("fused" in note for note in open_engine(plan).provenance.notes)


def has_fused_attention(plan: Path) -> bool:
    """Plans name their kernels; TensorRT-RTX's fused attention is the only one with ``mha`` in its name."""
    return b"name=_gemm_mha" in (plan / "rank0.engine").read_bytes()


def test_tensorrt_without_its_gpu_points_to_tensorrt_rtx() -> None:
    with pytest.raises(BackendError, match="tensorrt_rtx"):
        choose("tensorrt")


def test_multiple_profiles(onnx: Path, tmp_path: Path) -> None:
    """One for each batch size that rounds are padded to, and for one token and several."""
    sizes = {"max_draft_len": 4, "max_batch_size": 6, "max_input_len": 32}
    flags = {"backend": "tensorrt_rtx", "compute_capabilities": (89,), **sizes}
    plan = make_engine(onnx / "target", tmp_path / "plan", multiple_profiles=True, **flags)
    config = open_engine(plan)
    assert config.build_config.multiple_profiles
    rounds = [profile for profile in config.build_config.profiles if profile.name == "generation"]
    batches = [(1, 1, 1), (2, 2, 2), (3, 4, 4), (5, 6, 6)]
    assert [(profile.batch, profile.sequence) for profile in rounds] == [
        (batch, length) for batch in batches for length in ((1, 1, 1), (2, 5, 5))
    ]
    lines = describe(plan, as_json=False).splitlines()
    assert sum(line.startswith("generation ") for line in lines) == len(rounds)
    where = {"checkpoint_dir": onnx / "target", "output_dir": tmp_path / "fewer", **flags}
    dry = [plan_engine(*engine_options({**where, "multiple_profiles": multiple}, None)) for multiple in (True, False)]
    assert [describe_plan(one).count(" generation, batch ") for one in dry] == [len(rounds), 1]
    assert weight_bytes(dry[0]) == 2 * weight_bytes(dry[1])
    fewer = make_engine(onnx / "target", tmp_path / "fewer", **flags)
    assert len(open_engine(fewer).build_config.profiles) == 2
    assert (fewer / PLAN_NAME).read_bytes() != (plan / PLAN_NAME).read_bytes()


def test_the_cpu_has_no_profiles_and_only_tensorrt_a_timing_cache(onnx: Path, tmp_path: Path) -> None:
    with pytest.raises(BackendError, match="--multiple_profiles: an engine of onnxruntime has no profiles"):
        make_engine(onnx / "target", tmp_path / "plan", backend="onnxruntime", multiple_profiles=True)
    for backend, words in (("onnxruntime", "leave it out"), ("tensorrt_rtx", "are compiled where they run")):
        with pytest.raises(
            BackendError, match=f"--timing_cache is supported only by tensorrt, not by {backend}; .*{words}"
        ):
            make_engine(onnx / "target", tmp_path / "plan", backend=backend, timing_cache=tmp_path / "timings")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:.*Timing cache operations are no-ops:DeprecationWarning")
def test_a_timing_cache_is_a_file_that_is_not_lost(tmp_path: Path) -> None:
    """TensorRT-RTX's interface is TensorRT's, whose builder needs a GPU; its cache has no timings."""
    trt = pytest.importorskip("tensorrt_rtx")
    log = _log(trt)
    builder = trt.Builder(log)
    config = builder.create_builder_config()
    file = tmp_path / "caches" / "timings"
    cache = load_timings(config, file, log)
    save_timings(config, cache, file, log)
    assert file.stat().st_size > 100
    assert not log.warnings
    file.write_bytes(b"no timings")
    save_timings(config, cache, file, log)
    assert file.read_bytes() == b"no timings"
    assert any("timings: not written" in note for note in log.notes())
    with pytest.raises(BuildError, match=r"timings: TensorRT does not take it \(.*; give another file"):
        load_timings(config, file, log)
    assert file.read_bytes() == b"no timings"
