"""How many bytes of weights a pass reads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest
from safetensors.numpy import load_file

from specrun.evaluation.weight_bytes import weight_bytes, weight_bytes_of


def test_the_bytes_of_a_pass_are_those_of_the_weights(engines: Path, hf: Path) -> None:
    weights = load_file(hf / "target" / "model.safetensors")
    embedding = "model.embed_tokens.weight"
    tied = "lm_head.weight" not in weights
    expected = sum(4 * weight.size for name, weight in weights.items() if name != embedding or tied)
    assert weight_bytes_of(engines / "target") == pytest.approx(expected, rel=0.05), "beside tables of positions"


def test_a_table_of_which_rows_are_read_does_not_count() -> None:
    table, weight = (ir.tensor(np.ones((100, 4), np.float32), name=name) for name in ("table", "weight"))
    values = [ir.Value(name=t.name, const_value=t, type=ir.TensorType(t.dtype)) for t in (table, weight)]
    ids, x = ir.Value(name="ids"), ir.Value(name="x")
    nodes = [ir.node("Gather", [values[0], ids]), ir.node("MatMul", [x, values[1]]), ir.node("Neg", [values[1]])]
    graph = ir.Graph([ids, x], [], nodes=nodes, initializers=values)
    assert weight_bytes(graph) == 1600, "the weight once"
