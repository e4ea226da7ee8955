"""The table of element types against the libraries whose names and numbers it holds."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper

from specrun.backends.ort import session_options
from specrun.engine_dir.dtypes import DTYPES, FLOAT_NAMES, ElementType

NAMES = {"float32": "FLOAT", "float8_e4m3fn": "FLOAT8E4M3FN"}
"""ONNX's, where they are not torch's."""


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_the_table_is_the_libraries(dtype: ElementType) -> None:
    """ONNX's number, the storage's size, and what ONNX Runtime calls a tensor of it."""
    assert TensorProto.DataType.Name(dtype.onnx) == NAMES.get(dtype.name, dtype.name.upper())
    assert dtype.nbytes == getattr(torch, dtype.name).itemsize
    value = helper.make_tensor_value_info("x", dtype.onnx, [2])
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", [value], [])
    graph.output.append(helper.make_tensor_value_info("y", dtype.onnx, [2]))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnxruntime, options = session_options()
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    assert session.get_inputs()[0].type == f"tensor({dtype.onnxruntime})"


def test_noise_is_a_few_units_of_rounding() -> None:
    for name in FLOAT_NAMES:
        noise, eps = DTYPES[name].noise, torch.finfo(getattr(torch, name)).eps
        assert 2 * eps < noise < 1000 * eps
        assert noise <= DTYPES[name].tolerance


def test_only_floats_round() -> None:
    assert {name for name, dtype in DTYPES.items() if dtype.noise} == set(FLOAT_NAMES)
    assert np.issubdtype(DTYPES["int64"].storage, np.integer)
