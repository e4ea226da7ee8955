"""Angles by position beside those that a graph computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from specbuild.compilers.cpu.attention import OPERATOR, fuse_cached_attention
from specbuild.compilers.cpu.rotation import angles_by_position, look_up_by_position
from specrun.engine_dir.config import GRAPH_NAME
from specrun.engine_dir.contract import INPUT_IDS, WRITE_INDICES

LENGTH = 64


@pytest.fixture
def graph(onnx: Path) -> ir.Model:
    return ir.load(onnx / "target" / GRAPH_NAME)


def angles(graph: ir.Model) -> tuple[ir.Value, ir.Value]:
    cos, sin = next(node for node in graph.graph if node.op_type == "RotaryEmbedding").inputs[1:3]
    assert cos is not None and sin is not None
    return cos, sin


def test_tables_have_the_cosine_and_sine_of_each_position(graph: ir.Model) -> None:
    found = angles_by_position(graph.graph, angles(graph), LENGTH)
    assert found is not None
    cos, sin = (np.asarray(value.const_value.numpy()) for value in found if value.const_value is not None)
    frequencies = next(
        np.asarray(value.const_value.numpy())
        for name, value in graph.graph.initializers.items()
        if "inv_freq" in name and value.const_value is not None
    )
    expected = np.arange(LENGTH)[:, None] * frequencies.reshape(1, -1).astype(np.float64)
    np.testing.assert_allclose(cos, np.cos(expected), atol=1e-5)
    np.testing.assert_allclose(sin, np.sin(expected), atol=1e-5)


def test_layers_share_the_tables(graph: ir.Model) -> None:
    fuse_cached_attention(graph, LENGTH)
    layers = [node for node in graph.graph if node.op_type == OPERATOR]
    assert len(layers) == 2
    assert layers[0].inputs[6:] == layers[1].inputs[6:]
    assert all(value is not None and value.is_initializer() for value in layers[0].inputs[6:])
    assert not {"Cos", "Sin", "Range"} & {node.op_type for node in graph.graph}


def test_angles_that_no_attention_takes_are_looked_up(graph: ir.Model) -> None:
    look_up_by_position(graph, LENGTH)
    operators = {node.op_type for node in graph.graph}
    assert not {"Cos", "Sin"} & operators and "RotaryEmbedding" in operators
    tables = [node.inputs[0] for node in graph.graph if node.name and node.name.endswith(".of_tokens")]
    assert [value.shape[0] for value in tables if value is not None and value.shape is not None] == [LENGTH] * 2


def stretch_by_length(graph: ir.Model, cos: ir.Value) -> ir.Value:
    """By how many tokens a pass has, as scalings do that depend on the longest text."""
    ids = next(value for value in graph.graph.inputs if value.name == INPUT_IDS)
    size = ir.node("Shape", [ids], {"start": 1, "end": 2}, name="length")
    number = ir.node("Cast", size.outputs, {"to": int(ir.DataType.FLOAT)}, name="number")
    return scaled(graph, cos, [size, number])


def stretch_by_largest(graph: ir.Model, cos: ir.Value) -> ir.Value:
    """By the largest position of a pass, as dynamic scalings do."""
    first = next(value for value in graph.graph.inputs if value.name == WRITE_INDICES)
    largest = ir.node("ReduceMax", [first], {"keepdims": 0}, name="largest")
    number = ir.node("Cast", largest.outputs, {"to": int(ir.DataType.FLOAT)}, name="number")
    return scaled(graph, cos, [largest, number])


def stretch_by_tokens(graph: ir.Model, cos: ir.Value) -> ir.Value:
    ids = next(value for value in graph.graph.inputs if value.name == INPUT_IDS)
    number = ir.node("Cast", [ids], {"to": int(ir.DataType.FLOAT)}, name="number")
    axis = ir.node("Constant", [], {"value": ir.tensor([-1])}, name="axis")
    column = ir.node("Unsqueeze", [number.outputs[0], axis.outputs[0]], name="column")
    return scaled(graph, cos, [number, axis, column])


def scaled(graph: ir.Model, cos: ir.Value, nodes: list[ir.Node]) -> ir.Value:
    product = ir.node("Mul", [cos, nodes[-1].outputs[0]], name="stretched")
    for node in (*nodes, product):
        node.outputs[0].name = f"{node.name}.0"
    before = cos.producer()
    assert before is not None
    graph.graph.insert_after(before, [*nodes, product])
    return product.outputs[0]


@pytest.mark.parametrize("change", [stretch_by_length, stretch_by_largest, stretch_by_tokens])
def test_angles_that_depend_on_more_than_positions_stay(graph: ir.Model, change: object) -> None:
    assert callable(change)
    cos, sin = angles(graph)
    assert angles_by_position(graph.graph, (change(graph, cos), sin), LENGTH) is None
