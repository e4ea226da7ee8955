"""Which attention ``CachedAttention`` stands for. What it computes: cpu_operators/test_cached_attention.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
import torch

from specbuild.compilers.cpu.attention import OPERATOR, PACKED_OPERATOR, fuse_cached_attention
from specbuild.sharding.shard import shard
from specrun.engine_dir.config import GRAPH_NAME, open_engine
from tests.helpers.engines import engine_graph, make_engine, make_onnx
from tests.helpers.families import save_checkpoint
from tests.helpers.parity import STEPS, largest_difference
from tests.helpers.ranks import load, make_checkpoint, shard_difference

LAYERS = 2


@pytest.fixture
def graph(onnx: Path) -> ir.Model:
    return ir.load(onnx / "target" / GRAPH_NAME)


def test_a_layers_attention_becomes_one_operator(graph: ir.Model, engines: Path) -> None:
    names = [(output.name, output.shape) for output in graph.graph.outputs]
    assert fuse_cached_attention(graph, 64) == LAYERS
    operators = Counter(node.op_type for node in graph.graph)
    assert operators[OPERATOR] == LAYERS
    assert not {"Attention", "TensorScatter", "RotaryEmbedding", "Transpose", "LessOrEqual"} & operators.keys()
    assert [(output.name, output.shape) for output in graph.graph.outputs] == names
    built = Counter(node.op_type for node in engine_graph(engines / "target"))
    assert built[OPERATOR] == LAYERS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["gemma3", "qwen3"])
def test_heads_that_are_normalized_have_it_too(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Whether a family normalizes them before they are swapped or behind; and norms of inputs belong to products."""
    source = save_checkpoint(tmp_path / "hf", family, dtype=dtype)
    onnx = make_onnx(source, tmp_path / "onnx")
    engine = make_engine(onnx, tmp_path / "engine", max_draft_len=2)
    layers = len([node for node in ir.load(onnx / GRAPH_NAME).graph if node.op_type == "Attention"])
    operators = Counter(node.op_type for node in engine_graph(engine))
    assert layers and operators[PACKED_OPERATOR if dtype == torch.bfloat16 else OPERATOR] == layers
    of_layer = {"gemma3": 4, "qwen3": 2}[family]  # Queries and keys; and what leaves a block, which no product reads.
    assert operators["RMSNorm"] == of_layer * layers
    assert not {"RMSNormalization", "Reshape", "Add"} & operators.keys()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("family", "attribute", "inputs"), [("gemma2", 50.0, 8), ("gpt_oss", 0.0, 9)])
def test_soft_caps_and_sinks_have_it_too(
    family: str, attribute: float, inputs: int, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Both families have windows in every other layer. The bits of a token are the same in every pass."""
    source = save_checkpoint(tmp_path / "hf", family, dtype=dtype)
    engine = make_engine(make_onnx(source, tmp_path / "onnx"), tmp_path / "engine", max_draft_len=4)
    graph = engine_graph(engine)
    nodes = [node for node in graph if node.op_type in (OPERATOR, PACKED_OPERATOR)]
    assert [node.attributes["window"].as_int() > 0 for node in nodes] == [True, False]
    assert [node.attributes["softcap"].as_float() for node in nodes] == [attribute] * LAYERS
    assert [sum(bool(value and value.name) for value in node.inputs) for node in nodes] == [inputs] * LAYERS
    assert not {"Attention", "TensorScatter"} & {node.op_type for node in graph}
    assert open_engine(engine).exact_on
    tolerance = 1e-5 if dtype == torch.float32 else 1e-3
    assert largest_difference(source, engine, dtype, STEPS) < tolerance


def test_ranks_have_the_sinks_of_their_heads(shared: Path) -> None:
    checkpoint = make_checkpoint(shared, "gpt_oss")
    assert shard_difference(checkpoint, 2) < 1e-5
    _, first, second = ranks = [load(checkpoint) for _ in range(3)]
    for rank, model in enumerate((first, second)):
        shard(model, rank, 2)
    assert [fuse_cached_attention(model, 64) for model in ranks] == [LAYERS] * 3
    found = [of_type(model, OPERATOR).inputs[8] for model in ranks]
    expected, *parts = [value.const_value.numpy().reshape(-1) for value in found if value and value.const_value]
    np.testing.assert_array_equal(np.concatenate(parts), expected)


def of_type(graph: ir.Model, operator: str) -> ir.Node:
    return next(node for node in graph.graph if node.op_type == operator)


def test_a_soft_cap_of_the_standard_operator_is_kept(graph: ir.Model) -> None:
    of_type(graph, "Attention").attributes["softcap"] = ir.AttrFloat32("softcap", 30.0)
    assert fuse_cached_attention(graph, 64) == LAYERS
    assert of_type(graph, OPERATOR).attributes["softcap"].as_float() == 30


def rotate_otherwise(graph: ir.Model) -> None:
    of_type(graph, "RotaryEmbedding").attributes["interleaved"] = ir.AttrInt64("interleaved", 1)


def see_the_next_token(graph: ir.Model) -> None:
    """In one layer: its mask is another."""
    old = of_type(graph, "LessOrEqual")
    one = ir.Value(name="one", const_value=ir.tensor([1]))
    graph.graph.register_initializer(one)
    later = ir.node("Add", [old.inputs[1], one], name="later")
    mask = ir.node("LessOrEqual", [old.inputs[0], later.outputs[0]], name="mask")
    graph.graph.insert_after(old, [later, mask])
    of_type(graph, "Attention").replace_input_with(3, mask.outputs[0])


def write_elsewhere(graph: ir.Model) -> None:
    scatter = of_type(graph, "TensorScatter")
    twice = ir.node("Add", [scatter.inputs[2], scatter.inputs[2]], name="twice")
    graph.graph.insert_before(scatter, twice)
    scatter.replace_input_with(2, twice.outputs[0])


def read_a_cache_twice(graph: ir.Model) -> None:
    scatter = of_type(graph, "TensorScatter")
    size = ir.node("Shape", [scatter.outputs[0]], name="size")
    graph.graph.insert_after(scatter, size)


def count_positions(graph: ir.Model) -> None:
    of_type(graph, "Attention").attributes["is_causal"] = ir.AttrInt64("is_causal", 1)


def cap_elsewhere(graph: ir.Model) -> None:
    """The quotient in front of tanh is not that of the factor behind it."""
    replace_constant(graph, of_type(graph, "Tanh").inputs[0], 3.0)


def drop_more_weights(graph: ir.Model) -> None:
    """Than the sink's."""
    (reader,) = (use.node for use in of_type(graph, "Softmax").outputs[0].uses())
    replace_constant(graph, reader.outputs[0], [-2], place=2)


def replace_constant(graph: ir.Model, value: ir.Value | None, number: list[int] | float, place: int = 1) -> None:
    """Give the node that makes ``value`` another constant."""
    node = value.producer() if value is not None else None
    assert node is not None
    other = ir.Value(name="other", const_value=ir.tensor(number))
    graph.graph.register_initializer(other)
    node.replace_input_with(place, other)


@pytest.mark.parametrize(("family", "change"), [("gemma2", cap_elsewhere), ("gpt_oss", drop_more_weights)])
def test_what_is_written_out_otherwise_stays(family: str, change: Callable[[ir.Model], None], tmp_path: Path) -> None:
    checkpoint = make_onnx(save_checkpoint(tmp_path / "hf", family), tmp_path / "onnx", verify=False)
    model = ir.load(checkpoint / GRAPH_NAME)
    change(model)
    assert fuse_cached_attention(model, 64) == LAYERS - 1


@pytest.mark.parametrize("change", [count_positions, see_the_next_token])
def test_what_is_another_computation_stays(graph: ir.Model, change: Callable[[ir.Model], None]) -> None:
    change(graph)
    assert fuse_cached_attention(graph, 64) == LAYERS - 1
    assert Counter(node.op_type for node in graph.graph)["Attention"] == 1


@pytest.mark.parametrize(
    ("change", "left"),
    [
        (rotate_otherwise, {"RotaryEmbedding": 2}),
        (write_elsewhere, {"RotaryEmbedding": 2, "TensorScatter": 2}),
        (read_a_cache_twice, {"RotaryEmbedding": 2, "TensorScatter": 2}),
    ],
)
def test_what_the_operator_does_not_do_is_done_before(
    graph: ir.Model, change: Callable[[ir.Model], None], left: dict[str, int]
) -> None:
    """Heads that are rotated in another way, and caches that are written so or that others read."""
    change(graph)
    assert fuse_cached_attention(graph, 64) == LAYERS
    operators = Counter(node.op_type for node in graph.graph)
    assert {name: operators[name] for name in ("RotaryEmbedding", "TensorScatter") if operators[name]} == left


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["phi2", "gpt_neox", "deepseek_v2", "kimi_linear", "llama4"])
def test_every_kind_of_attention_is_the_operator(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Heads of which a part is rotated, latent attention, chunks and heads that are normalized behind a rotation."""
    source = save_checkpoint(tmp_path / "hf", family, dtype=dtype)
    engine = make_engine(make_onnx(source, tmp_path / "onnx", verify=False), tmp_path / "engine", max_draft_len=4)
    nodes = [node for node in engine_graph(engine) if node.op_type == OPERATOR]
    assert len(nodes) == {"kimi_linear": 1}.get(family, LAYERS)
    assert {node.attributes["chunk"].as_int() for node in nodes} == ({0, 16} if family == "llama4" else {0})
    assert [node.attributes["rotated"].as_int() for node in nodes] == (
        [8] * LAYERS if family == "phi2" else [0] * len(nodes)
    )
    assert open_engine(engine).exact_on
    assert largest_difference(source, engine, dtype, STEPS) < (1e-5 if dtype == torch.float32 else 2e-2)


@pytest.mark.parametrize("width", [20, 24])
def test_heads_of_any_width_have_it_too(width: int, tmp_path: Path) -> None:
    source = save_checkpoint(tmp_path / "hf", "llama3", head_dim=width)
    engine = make_engine(make_onnx(source, tmp_path / "onnx", verify=False), tmp_path / "engine", max_draft_len=4)
    assert Counter(node.op_type for node in engine_graph(engine))[OPERATOR] == LAYERS
    assert open_engine(engine).exact_on
    assert largest_difference(source, engine, torch.float32, STEPS) < 1e-5
