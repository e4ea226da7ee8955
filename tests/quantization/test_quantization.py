"""Weights in few bits: rounding, the standard ONNX forms, and what ONNX Runtime makes of them on a processor."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest
import torch

from specbuild.compilers.cpu import formats as cpu_formats
from specbuild.compilers.tensorrt.formats import move_zero_points, round_token_inputs
from specbuild.graph import ops as graphs
from specbuild.graph.tidy import write_out_gemms
from specbuild.quantization.insert_qdq import quantize_embedding, quantize_matmul, weighted_matmuls
from specbuild.quantization.recipe import QFormat, Recipe, Storage
from specbuild.quantization.rounding import CodeForm, Rounded, global_scale, round_weight
from specbuild.weights.packed import Activation, Packed
from specrun.backends.ort import session_options
from specrun.errors import BuildConfigError
from tests.helpers.own_products import Form, session
from tests.helpers.own_products import packed as weight_of

INPUTS, CHANNELS = 256, 24
FORMS: dict[CodeForm, tuple[int, float]] = {
    "int8": (INPUTS, 0.5),
    "int4": (32, 0.5),
    "float8": (INPUTS, 16),
    "float4": (16, 1),
}
"""Block, and the largest error of one weight in steps of its scale."""
TYPES = {"int8": ir.DataType.INT8, "int4": ir.DataType.INT4, "float8": ir.DataType.FLOAT8E4M3FN}


def weight_matrix(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[N, K] with an outlier and a group of zeros."""
    weight = torch.randn(CHANNELS, INPUTS, generator=torch.Generator().manual_seed(0)) * 0.02
    weight[3, 5], weight[4, :64] = 0.5, 0
    return weight.to(dtype)


def packed(form: CodeForm, weight: torch.Tensor, block: int | None, activation: Activation | None = None) -> Packed:
    """``weight`` [N, K] in ``form``, as ``pack_model`` makes it."""
    rounded = round_weight(weight, form, block or INPUTS)
    scales = rounded.scales if block else rounded.scales[0]
    return Packed(
        codes=ir.Tensor(rounded.codes, dtype=TYPES.get(form, ir.DataType.FLOAT4E2M1)),
        scales=ir.Tensor(scales),
        block=block,
        scale_units=ir.Tensor(np.float32(global_scale(weight))) if form == "float4" else None,
        activation=activation,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", list(FORMS))
def test_every_weight_is_rounded_to_the_nearest_code(form: CodeForm, dtype: torch.dtype) -> None:
    block, steps = FORMS[form]
    weight = weight_matrix(dtype)
    rounded = round_weight(weight, form, block)
    unit = global_scale(weight) if form == "float4" else 1.0
    scales = np.repeat(rounded.scales.astype(np.float32) * unit, block, axis=0)
    error = np.abs(rounded.codes.astype(np.float32) * scales - weight.float().numpy().T)
    if form == "int4":  # Clipping is allowed where it makes the block's squared error smaller.
        assert (error <= steps * np.abs(scales) * 1.01).mean() > 0.98
    else:
        assert (error <= steps * np.abs(scales) * 1.01).all()
    assert not rounded.codes.astype(np.float32)[:64, 4].any()
    assert np.isfinite(scales).all()


def test_clipping_makes_the_squared_error_of_4_bits_smaller() -> None:
    weight = weight_matrix()
    rounded = round_weight(weight, "int4", 128)
    error = rounded.codes.astype(np.float32) * np.repeat(rounded.scales, 128, axis=0) - weight.numpy().T
    groups = weight.numpy().reshape(-1, 128)
    plain = np.take_along_axis(groups, np.abs(groups).argmax(axis=1)[:, None], axis=1) / -8
    plain[plain == 0] = 1
    unclipped = np.rint(groups / plain).clip(-8, 7) * plain - groups
    assert np.square(error).sum() < 0.95 * np.square(unclipped).sum()


def test_minima_make_the_error_smaller() -> None:
    """Where weights lie on both sides of zero alike, and more where they do not."""
    for shift, least in ((0.0, 0.9), (0.02, 0.5)):
        weight = weight_matrix() + shift
        errors = []
        for form in ("int4", "uint4"):
            found = round_weight(weight, form, 32)
            scales, minima = found.scales.astype(np.float32), np.zeros_like(found.scales, np.float32)
            if found.offsets is not None and found.scale_units is not None and found.offset_units is not None:
                scales, minima = scales * found.scale_units, found.offsets * found.offset_units
            values = found.codes.astype(np.float32) * np.repeat(scales, 32, axis=0) + np.repeat(minima, 32, axis=0)
            errors.append(np.square(values - weight.numpy().T).sum())
        assert errors[1] < least * errors[0]


@pytest.mark.parametrize("form", ["int4", "uint4"])
def test_rounding_by_slices_changes_nothing(form: CodeForm, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = round_weight(weight_matrix(), form, 32)
    monkeypatch.setattr("specbuild.quantization.rounding._AT_A_TIME", 3 * INPUTS)
    sliced = round_weight(weight_matrix(), form, 32)
    for one, other in zip(whole, sliced, strict=True):
        assert one is other if one is None or other is None else np.array_equal(one, other)


def test_scales_of_another_shape_are_refused() -> None:
    codes, scales = ir.Tensor(np.zeros((64, 8), np.int8)), ir.Tensor(np.ones((3, 8), np.float32))
    with pytest.raises(ValueError, match=r"scales of shape \(3, 8\), expected \(2, 8\)"):
        Packed(codes, scales, block=32)


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("model.layers.0.mlp.up_proj", "uint4"),
        ("lm_head", "int8"),
        ("model.layers.0.mlp.gate", None),
        ("x.q_proj", None),
    ],
)
def test_recipes_leave_routers_and_what_is_excluded_alone(module: str, expected: str | None) -> None:
    storage = Recipe("int4", exclude=("*.q_proj",)).product(module, 256, module == "lm_head")
    assert (storage and storage.form) == expected


@pytest.mark.parametrize(
    ("qformat", "inputs", "block"),
    [
        ("int4", 704, 32),
        ("int4", 720, 16),
        ("int8_wo", 768, 32),
        ("int8", 768, 32),
        ("int8", 720, 16),
        ("int8", 712, None),
    ],
)
@pytest.mark.parametrize("is_head", [False, True])
def test_default_groups_divide_the_channels(qformat: QFormat, inputs: int, block: int | None, is_head: bool) -> None:
    storage = Recipe(qformat).product("up_proj", inputs, is_head)
    assert storage is not None
    assert storage.block == block


def test_int8_has_a_scale_a_channel_where_other_runtimes_read_it() -> None:
    recipe = Recipe("int8", for_others=True)
    assert recipe.product("up_proj", 768, False) == Storage("int8", activation=Activation("int8"))
    with pytest.raises(
        BuildConfigError, match="--group_size is for int8_wo, int4, int4_sym; leave it out with --qformat int8"
    ):
        Recipe("int8", group_size=64, for_others=True)


def test_a_group_that_does_not_divide_is_an_error() -> None:
    with pytest.raises(BuildConfigError, match=r"up_proj: 704 input channels .* --group_size 128.*--exclude up_proj"):
        Recipe("int4", group_size=128).product("up_proj", 704, False)
    with pytest.raises(BuildConfigError, match="power of two"):
        Recipe("int4", group_size=48)
    with pytest.raises(BuildConfigError, match="--group_size is for int8, int8_wo, int4, int4_sym; leave"):
        Recipe("fp8", group_size=64)


def test_int4_serves_the_channels_whose_inputs_are_large() -> None:
    """The error of the output becomes smaller, that of the weights larger; a channel without input counts a little."""
    weight = weight_matrix()
    squares = torch.from_numpy(np.random.default_rng(3).uniform(0, 1, INPUTS) ** 8).float()
    plain, weighted = (round_weight(weight, "int4", 32, given) for given in (None, squares))
    same = round_weight(weight, "int4", 32, torch.full((INPUTS,), 7.0))
    assert (same.codes == plain.codes).all() and (same.scales == plain.scales).all()

    def error(found: Rounded, squares: torch.Tensor) -> float:
        numbers = found.codes.astype(np.float32) * np.repeat(found.scales, 32, axis=0)
        return float((((numbers - weight.numpy().T) ** 2).T * squares.numpy()).sum())

    assert error(weighted, squares) < 0.9 * error(plain, squares)
    assert error(plain, torch.ones(INPUTS)) < error(weighted, torch.ones(INPUTS)) < 4 * error(plain, torch.ones(INPUTS))
    nothing = round_weight(weight, "int4", 32, torch.zeros(INPUTS))
    assert (nothing.codes == plain.codes).all()


def graph_of(weight: npt.NDArray[Any], gemm: bool) -> ir.Model:
    """x [2, 3, K] @ weight [N, K]^T + 1, as torch's exporter writes Linear: Transpose and MatMul, or as Gemm."""
    dtype = ir.DataType.BFLOAT16 if weight.dtype == ml_dtypes.bfloat16 else ir.DataType.FLOAT
    x = ir.Value(name="x", type=ir.TensorType(dtype), shape=ir.Shape([6, INPUTS] if gemm else [2, 3, INPUTS]))
    factor = ir.Value(name="w", type=ir.TensorType(dtype), shape=ir.Shape(weight.shape), const_value=ir.Tensor(weight))
    ones = np.ones(CHANNELS, weight.dtype)
    bias = ir.Value(name="b", type=ir.TensorType(dtype), shape=ir.Shape([CHANNELS]), const_value=ir.Tensor(ones))
    if gemm:
        nodes = [ir.node("Gemm", [x, factor, bias], {"transB": 1, "alpha": 1.0, "beta": 1.0})]
    else:
        transpose = ir.node("Transpose", [factor], {"perm": [1, 0]})
        product = ir.node("MatMul", [x, transpose.outputs[0]])
        nodes = [transpose, product, ir.node("Add", [product.outputs[0], bias])]
    for number, node in enumerate(nodes):
        node.outputs[0].name, node.outputs[0].type = f"n{number}", ir.TensorType(dtype)
    nodes[-1].outputs[0].name = "y"
    graph = ir.Graph([x], [nodes[-1].outputs[0]], nodes=nodes, initializers=[factor, bias], opset_imports={"": 24})
    model = ir.Model(graph, ir_version=10)
    write_out_gemms(model)
    return model


def run(model: ir.Model, x: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], Counter[str]]:
    """The output of ``model`` in ONNX Runtime, and its operators."""
    ort, options = session_options()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    opened = ort.InferenceSession(graphs.to_bytes(model), options, providers=["CPUExecutionProvider"])
    return opened.run(None, {"x": x})[0], Counter(node.op_type for node in model.graph)


@pytest.mark.parametrize("gemm", [False, True])
@pytest.mark.parametrize("form", ["int8", "int4", "float8"])
def test_a_product_multiplies_by_the_dequantized_weight(form: CodeForm, gemm: bool) -> None:
    weight = weight_matrix()
    block = None if form == "float8" else 32
    stored = packed(form, weight, block)
    model = graph_of(weight.numpy(), gemm)
    (product,) = weighted_matmuls(model)
    quantize_matmul(model, product, stored)
    assert "w" not in model.graph.initializers
    x = np.random.default_rng(1).standard_normal((6, INPUTS) if gemm else (2, 3, INPUTS)).astype(np.float32)
    found, operators = run(model, x)
    assert operators["DequantizeLinear"] == 1
    np.testing.assert_allclose(found, x @ stored.dequantize() + 1, atol=1e-5)
    assert np.abs(stored.dequantize() - weight.numpy().T).max() > 1e-5


@pytest.mark.parametrize("block", [None, 32], ids=["by channel", "in groups"])
def test_tensorrt_rounds_each_token_by_its_own_largest_value(block: int | None) -> None:
    """And gets weights with one scale a column, as its products of int8 want them; in the graph nothing is rounded."""
    weight = weight_matrix()
    stored = packed("int8", weight, block, Activation("int8"))
    model = graph_of(weight.numpy(), gemm=False)
    (product,) = weighted_matmuls(model)
    quantize_matmul(model, product, stored)
    x = np.random.default_rng(1).standard_normal((2, 3, INPUTS)).astype(np.float32)
    x[0, 1] *= 1000
    x[1, 2] = 0
    unrounded, _ = run(model, x)
    np.testing.assert_allclose(unrounded, x @ stored.dequantize() + 1, rtol=1e-5, atol=1e-3)
    assert round_token_inputs(model) == (0 if block is None else 1)
    found, operators = run(model, x)
    assert operators["QuantizeLinear"] == 1
    inputs = [node.inputs for node in model.graph if node.op_type == "DequantizeLinear"]
    (scales,) = [own[1] for own in inputs if own[0] is not None and own[0].is_initializer()]
    assert scales is not None and scales.shape == ir.Shape([CHANNELS])
    largest = np.maximum(np.abs(x).max(axis=-1, keepdims=True), np.float32(2.0**-126))
    step = np.float32(1 / 127)
    rounded = np.rint(x / largest / step) * step
    by_channel = packed("int8", torch.from_numpy(stored.dequantize().T.copy()), None)
    np.testing.assert_allclose(found, rounded @ by_channel.dequantize() * largest + 1, rtol=1e-5, atol=1e-4)
    assert (found[1, 2] == 1).all()


def test_reordered_channels_and_input_factors_reach_the_product() -> None:
    weight = weight_matrix()
    rounded = round_weight(weight, "int8", 32)
    order = np.random.default_rng(0).permutation(INPUTS)
    factors = np.linspace(0.5, 2, INPUTS, dtype=np.float32)
    stored = Packed(
        ir.Tensor(rounded.codes), ir.Tensor(rounded.scales), block=32, channel_order=order, input_factors=factors
    )
    model = graph_of(weight.numpy(), gemm=True)
    (product,) = weighted_matmuls(model)
    quantize_matmul(model, product, stored)
    x = np.random.default_rng(1).standard_normal((6, INPUTS)).astype(np.float32)
    found, _ = run(model, x)
    np.testing.assert_allclose(found, x @ stored.dequantize() + 1, atol=1e-4)


def embedding_graph(table: npt.NDArray[Any]) -> ir.Model:
    """ids x [2, 3] looked up in a table [V, H]."""
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([2, 3]))
    kind = ir.TensorType(ir.DataType.FLOAT)
    weight = ir.Value(name="w", type=kind, shape=ir.Shape(table.shape), const_value=ir.Tensor(table))
    gather = ir.node("Gather", [weight, x], {"axis": 0})
    gather.outputs[0].name, gather.outputs[0].type = "y", kind
    graph = ir.Graph([x], [gather.outputs[0]], nodes=[gather], initializers=[weight], opset_imports={"": 24})
    return ir.Model(graph, ir_version=10)


@pytest.mark.parametrize("block", [None, 32], ids=["a scale a row", "in groups"])
def test_processors_look_an_embeddings_codes_up(block: int | None) -> None:
    """Instead of dequantizing the whole table."""
    table = weight_matrix()
    rounded = round_weight(table, "int8", block or INPUTS)
    scales = rounded.scales.T.copy() if block else rounded.scales[0]
    stored = Packed(ir.Tensor(np.ascontiguousarray(rounded.codes.T)), ir.Tensor(scales), axis=0, block=block)
    model = embedding_graph(table.numpy())
    quantize_embedding(model, next(iter(model.graph)), stored)
    ids = np.array([[0, 3, 23], [4, 4, 1]])
    found, _ = run(model, ids)
    np.testing.assert_array_equal(found, stored.dequantize()[ids])
    cpu_formats.prepare(model)
    assert [node.op_type for node in model.graph] == ["EmbeddingLookup"]
    np.testing.assert_array_equal(session(model).run(None, {"x": ids})[0], found)


@pytest.mark.parametrize(
    ("form", "block", "activation"),
    [
        ("int8", None, Activation("int8")),
        ("int8", None, Activation("int8", 0.05)),
        ("int8", 128, None),
        ("int8", None, None),
        ("int4", 32, None),
        ("float8", None, None),
        ("float8", None, Activation("float8", 0.01)),
        ("float4", 16, None),
    ],
)
def test_processors_get_a_fast_product_for_every_form(
    form: CodeForm, block: int | None, activation: Activation | None
) -> None:
    weight = weight_matrix()
    stored = packed(form, weight, block, activation)
    model = graph_of(weight.numpy(), gemm=False)
    (product,) = weighted_matmuls(model)
    quantize_matmul(model, product, stored)
    notes = cpu_formats.prepare(model)
    assert any("8-bit blocks" in note for note in notes) is (form in ("float8", "float4"))
    assert [node.op_type for node in model.graph] == ["QuantizedMatMul", "Add"]
    x = np.random.default_rng(1).standard_normal((2, 3, INPUTS)).astype(np.float32)
    expected = x @ stored.dequantize() + 1
    (found,) = session(model).run(None, {"x": x})
    assert np.abs(found - expected).max() < 0.02 * np.abs(expected).max()


def test_float4_is_exact_in_8_bits() -> None:
    stored = packed("float4", weight_matrix(), 16)
    assert stored.scale_units is not None
    codes, scales = cpu_formats.recode(cpu_formats.Weight(stored.codes, (stored.scales, stored.scale_units), 16))
    np.testing.assert_array_equal(codes * np.repeat(scales, 16, axis=0), stored.dequantize())
    assert codes.dtype == np.int8


def test_a_16_bit_graph_keeps_float32_scales_and_is_widened(tmp_path: Path) -> None:
    weight = weight_matrix()
    rounded = round_weight(weight, "int8", 32)
    stored = Packed(ir.Tensor(rounded.codes), ir.Tensor(rounded.scales), block=32)
    model = graph_of(weight.numpy().astype(ml_dtypes.bfloat16), gemm=False)
    (product,) = weighted_matmuls(model)
    quantize_matmul(model, product, stored)
    node = next(node for node in model.graph if node.op_type == "DequantizeLinear")
    assert node.attributes["output_dtype"].as_int() == ir.DataType.BFLOAT16
    graphs.widen_to_float32(model)
    x = np.random.default_rng(1).standard_normal((2, 3, INPUTS)).astype(np.float32)
    found, _ = run(model, x)
    np.testing.assert_allclose(found, x @ stored.dequantize() + 1, atol=1e-5)


def test_tensorrt_gets_weights_without_zero_points() -> None:
    """The same numbers: codes around zero, and a small product for what the zero points make."""
    weight = weight_matrix()
    low, high = weight.reshape(-1, 32).amin(1), weight.reshape(-1, 32).amax(1)
    steps = ((high - low).clamp(min=1e-6) / 15).reshape(CHANNELS, -1).T.contiguous()
    zeros = (-low / ((high - low).clamp(min=1e-6) / 15)).round().clamp(0, 15).reshape(CHANNELS, -1).T
    spread = zeros.repeat_interleave(32, 0)
    codes = (weight.T / steps.repeat_interleave(32, 0) + spread).round().clamp(0, 15)
    stored = Packed(
        ir.Tensor(codes.numpy().astype(ml_dtypes.uint4), dtype=ir.DataType.UINT4),
        ir.Tensor(steps.numpy()),
        ir.Tensor(zeros.numpy().astype(ml_dtypes.uint4), dtype=ir.DataType.UINT4),
        block=32,
    )
    model = graph_of(weight.numpy(), gemm=False)
    (product,) = weighted_matmuls(model)
    quantize_matmul(model, product, stored)
    x = np.random.default_rng(1).standard_normal((2, 3, INPUTS)).astype(np.float32)
    before, _ = run(model, x)
    assert move_zero_points(model) == 1
    assert not any(value.dtype == ir.DataType.UINT4 for value in model.graph.initializers.values())
    after, _ = run(model, x)
    np.testing.assert_allclose(after, before, atol=1e-5)
    np.testing.assert_allclose(before, x @ stored.dequantize() + 1, atol=1e-5)


@pytest.mark.parametrize("is_half", [False, True])
def test_tensorrt_gets_minima_as_a_small_product(is_half: bool) -> None:
    """The same numbers: codes around zero, and one product for minima and what moving the codes takes away."""
    own = weight_of(Form("uint4", 32, scales="int8", minima=True), INPUTS, CHANNELS)
    model = graph_of(own.dequantize().T.astype(ml_dtypes.bfloat16 if is_half else np.float32), gemm=False)
    (product,) = weighted_matmuls(model)
    quantize_matmul(model, product, own)
    assert move_zero_points(model) == 1
    operators = Counter(node.op_type for node in model.graph)
    assert operators["MatMul"] == 3 and operators["DequantizeLinear"] == 1
    types = {value.dtype for value in model.graph.initializers.values()}
    assert ir.DataType.UINT4 not in types and (ir.DataType.FLOAT in types) != is_half
    graphs.widen_to_float32(model)
    x = np.random.default_rng(1).standard_normal((2, 3, INPUTS)).astype(np.float32)
    found, _ = run(model, x)
    wanted = x @ own.dequantize() + 1
    assert np.abs(found - wanted).max() < (1e-2 if is_half else 1e-4) * np.abs(wanted).max()
