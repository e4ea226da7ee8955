"""Which tokens are taken before the last normalization."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import onnx_ir as ir
import pytest

from specbuild.compilers.cpu.wanted import take_wanted_tokens_first
from specrun.engine_dir.config import GRAPH_NAME


@pytest.fixture
def graph(onnx: Path) -> ir.Model:
    return ir.load(onnx / "target" / GRAPH_NAME)


def last_norm(graph: ir.Model) -> ir.Node:
    return [node for node in graph.graph if node.op_type == "RMSNormalization"][-1]


def test_wanted_tokens_alone_are_normalized(graph: ir.Model) -> None:
    take_wanted_tokens_first(graph)
    operators = Counter(node.op_type for node in graph.graph)
    assert operators["GatherND"] == 1
    assert not {"GatherElements", "Expand"} & operators.keys()
    source = last_norm(graph).inputs[0]
    assert source is not None
    taken = source.producer()
    assert taken is not None and taken.op_type == "GatherND"


def test_a_normalization_with_another_reader_stays_in_front(graph: ir.Model) -> None:
    """As where a head reads the target's features."""
    norm = last_norm(graph)
    graph.graph.insert_after(norm, ir.node("Identity", [norm.outputs[0]], name="reader"))
    graph.graph.outputs.append(next(node for node in graph.graph if node.name == "reader").outputs[0])
    take_wanted_tokens_first(graph)
    source = last_norm(graph).inputs[0]
    assert source is not None
    before = source.producer()
    assert before is not None and before.op_type != "GatherND"
    assert Counter(node.op_type for node in graph.graph)["GatherND"] == 1


def test_other_indices_are_left_alone(graph: ir.Model) -> None:
    gather = next(node for node in graph.graph if node.op_type == "GatherElements")
    gather.attributes["axis"] = ir.AttrInt64("axis", 0)
    take_wanted_tokens_first(graph)
    assert not Counter(node.op_type for node in graph.graph)["GatherND"]
