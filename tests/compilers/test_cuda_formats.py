"""Engines of ONNX Runtime for CUDA: which may be captured, and that other forms compute the same, on the CPU."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest

from specbuild.compilers.ort_cuda.formats import can_be_captured, has_float4, split_block_scales
from specbuild.graph.ops import to_bytes
from specrun.backends.ort_session import session_options


def run(model: ir.Model, **inputs: npt.NDArray[Any]) -> npt.NDArray[Any]:
    ort, options = session_options()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return np.asarray(ort.InferenceSession(to_bytes(model), options).run(None, inputs)[0])


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("y = MatMul (x, matrix)", True),
        ("w = DequantizeLinear (codes, scale)  t = Transpose (w)  y = MatMul (x, t)", True),
        ("y = MatMul (x, experts)", False),
        ("y = MatMul (x, x)", False),
        ("s = MatMul (x, matrix)  y = Softmax (s)", False),
        ("y = specrun.FloatMatMul (x, matrix)", False),
    ],
)
def test_what_may_be_captured(lines: str, expected: bool) -> None:
    weights: dict[str, npt.NDArray[Any]] = {
        "matrix": np.zeros((4, 4), np.float32),
        "experts": np.zeros((2, 4, 4), np.float32),
        "codes": np.zeros((4, 4), np.int8),
    }
    model = ir.from_onnx_text(
        f"""<ir_version: 10, opset_import: ["" : 24, "specrun" : 1]>
        agraph (float[A, 4, 4] x, float scale) => (float[A, 4, 4] y) {{ {lines} }}""",
        initializers=[ir.tensor(weight, name=name) for name, weight in weights.items() if name in lines],
    )
    for name, value in model.graph.initializers.items():
        value.shape = ir.Shape(weights[name].shape)
    assert can_be_captured(model) == expected


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("dtype", ["float", "float16"])
def test_experts_with_scales_of_blocks(blocks: int, dtype: str) -> None:
    model = ir.from_onnx_text(
        f"""<ir_version: 10, opset_import: ["" : 24]>
        agraph (int8[2, 6, 4] codes, {dtype}[2, {blocks}, 4] scales) => ({dtype}[2, 6, 4] weights)
        {{ weights = DequantizeLinear <axis = 1, block_size = {6 // blocks}> (codes, scales) }}"""
    )
    rng = np.random.default_rng(blocks)
    codes = rng.integers(-128, 128, (2, 6, 4)).astype(np.int8)
    scales = rng.random((2, blocks, 4)).astype("float32" if dtype == "float" else dtype)
    expected = run(model, codes=codes, scales=scales)
    split_block_scales(model)
    assert all("block_size" not in node.attributes for node in model.graph)
    np.testing.assert_array_equal(run(model, codes=codes, scales=scales), expected)


def test_matrices_keep_their_blocks() -> None:
    """ONNX Runtime has a product for them."""
    model = ir.from_onnx_text(
        """<ir_version: 10, opset_import: ["" : 24]>
        agraph (int8[6, 4] codes, float[2, 4] scales) => (float[6, 4] weights)
        { weights = DequantizeLinear <axis = 0, block_size = 3> (codes, scales) }"""
    )
    split_block_scales(model)
    assert [node.attributes["block_size"].as_int() for node in model.graph] == [3]


@pytest.mark.parametrize(("kind", "expected"), [(ml_dtypes.float4_e2m1fn, True), (np.int8, False)])
def test_float4_is_seen(kind: Any, expected: bool) -> None:
    model = ir.from_onnx_text(
        """<ir_version: 10, opset_import: ["" : 24]>
        agraph (float scale) => (float[6, 4] weights) { weights = DequantizeLinear (codes, scale) }""",
        initializers=[ir.tensor(np.zeros((6, 4), kind), name="codes")],
    )
    assert has_float4(model) == expected
