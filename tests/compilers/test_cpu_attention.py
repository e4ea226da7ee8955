"""Which attention ``CachedAttention`` stands for. What it computes: cpu_operators/test_cached_attention.py."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import pytest
import torch

from specbuild.compilers.cpu_attention import OPERATOR, fuse_cached_attention
from specrun.engine_dir.config import GRAPH_NAME
from tests.helpers.engines import make_engine, make_onnx
from tests.helpers.families import save_checkpoint

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
    built = Counter(node.op_type for node in ir.load(engines / "target" / GRAPH_NAME).graph)
    assert built[OPERATOR] == LAYERS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", ["gemma3", "qwen3"])
def test_heads_that_are_normalized_have_it_too(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Whether a family normalizes them before they are swapped or behind; and norms of inputs belong to products."""
    source = save_checkpoint(tmp_path / "hf", family, dtype=dtype)
    onnx = make_onnx(source, tmp_path / "onnx")
    engine = make_engine(onnx, tmp_path / "engine", max_draft_len=2)
    layers = len([node for node in ir.load(onnx / GRAPH_NAME).graph if node.op_type == "Attention"])
    operators = Counter(node.op_type for node in ir.load(engine / GRAPH_NAME).graph)
    assert layers and operators[OPERATOR] == layers
    of_layer = {"gemma3": 4, "qwen3": 2}[family]  # Queries and keys; and what leaves a block, which no product reads.
    assert operators["RMSNormalization"] == of_layer * layers


def of_type(graph: ir.Model, operator: str) -> ir.Node:
    return next(node for node in graph.graph if node.op_type == operator)


def cap(graph: ir.Model) -> None:
    of_type(graph, "Attention").attributes["softcap"] = ir.AttrFloat32("softcap", 30.0)


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


@pytest.mark.parametrize("change", [cap, rotate_otherwise, see_the_next_token, write_elsewhere, read_a_cache_twice])
def test_what_is_another_computation_stays(graph: ir.Model, change: Callable[[ir.Model], None]) -> None:
    change(graph)
    assert fuse_cached_attention(graph, 64) == LAYERS - 1
    assert Counter(node.op_type for node in graph.graph)["Attention"] == 1
