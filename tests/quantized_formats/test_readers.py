"""Readers of quantized checkpoints beside the libraries of their formats: tests/vectors, made by a script."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

import specbuild.quantized_formats.unpack.stored
from specbuild.quantized_formats.unpack.stored import CodeTensor
from specbuild.weights.packed import Activation, Packed
from specrun.backends.ort import session_options
from tests.helpers.stored_tensors import Array, Tensor, Vector, named

INT4, UINT4, INT8, UINT8 = ir.DataType.INT4, ir.DataType.UINT4, ir.DataType.INT8, ir.DataType.UINT8
FLOAT8, FLOAT4 = ir.DataType.FLOAT8E4M3FN, ir.DataType.FLOAT4E2M1
FLOAT, FLOAT16, BFLOAT16 = ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16

FORMS = {
    "ct-w4a16": (INT4, BFLOAT16, 32),
    "ct-w4a16-odd": (INT4, BFLOAT16, None),
    "ct-w4a16-asym": (UINT4, BFLOAT16, 32),
    "ct-w8a16": (INT8, BFLOAT16, None),
    "ct-w8a16-asym": (UINT8, BFLOAT16, 32),
    "ct-actorder": (INT4, BFLOAT16, 32),
    "ct-w8a8": (INT8, BFLOAT16, None),
    "ct-w8a8-static": (INT8, BFLOAT16, None),
    "ct-w8-naive": (INT8, BFLOAT16, 32),
    "ct-fp8": (FLOAT8, BFLOAT16, None),
    "ct-fp8-static": (FLOAT8, BFLOAT16, None),
    "ct-fp8-block": (FLOAT8, BFLOAT16, 32),
    "ct-nvfp4": (FLOAT4, FLOAT8, 16),
    "ct-nvfp4a16": (FLOAT4, FLOAT8, 16),
    "ct-mxfp4": (FLOAT4, BFLOAT16, 32),
    "fp8-block": (FLOAT8, FLOAT, 32),
    "fp8-tensor": (FLOAT8, FLOAT, None),
    "fbgemm": (FLOAT8, FLOAT, None),
    "awq": (UINT4, FLOAT16, 32),
    "gptq": (INT4, FLOAT16, 32),
    "gptq-desc-act": (INT4, FLOAT16, 32),
    "gptq-v2-asym": (UINT4, FLOAT16, 32),
    "gptq-v1-asym": (UINT4, FLOAT16, 32),
    "gptq-8bit": (UINT8, FLOAT16, None),
    "gptq-short-group": (UINT4, FLOAT16, 32),
    "torchao-float8": (FLOAT8, FLOAT, None),
    "torchao-float8-dynamic": (FLOAT8, FLOAT, None),
    "torchao-int8": (INT8, FLOAT, None),
    "torchao-int8-dynamic": (INT8, FLOAT, None),
    "torchao-intx": (INT4, BFLOAT16, 32),
    "torchao-int4": (INT4, BFLOAT16, 32),
    "modelopt-fp8": (FLOAT8, FLOAT, None),
    "modelopt-nvfp4": (FLOAT4, FLOAT8, 16),
    "modelopt-int4-awq": (INT4, FLOAT, 32),
    "modelopt-int8": (INT8, FLOAT, None),
}
"""Linear formats: type of codes and of scales, input channels that share a scale."""
TABLES = {"bnb-nf4": 64, "bnb-nf4-double": 32, "bnb-nf4-odd": 64, "bnb-fp4": 128}
"""Formats with a table of values: input channels that share a scale."""
ONE_ROUNDING = {"ct-nvfp4", "ct-nvfp4a16"}
"""The library divides by a scale that we multiply by the reciprocal of."""


def bits(values: Array, dtype: np.dtype[np.generic]) -> Array:
    return values.astype(dtype).astype(np.float32)


@pytest.mark.parametrize("name", FORMS)
def test_weights_are_the_library_s(name: str, tmp_path: Path) -> None:
    """The same values as the library's, rounded once to the type that the library computes in."""
    packed, expected = Vector(name, tmp_path).weight()
    assert packed.shape == expected.shape
    if name in ONE_ROUNDING:
        np.testing.assert_allclose(packed.dequantize(), expected.astype(np.float32), rtol=2**-8, atol=0)
    np.testing.assert_array_equal(bits(packed.dequantize(), expected.dtype), bits(expected, expected.dtype))


@pytest.mark.parametrize("name", FORMS)
def test_weights_stay_as_they_are_stored(name: str, tmp_path: Path) -> None:
    codes, scales, block = FORMS[name]
    vector = Vector(name, tmp_path)
    packed, _ = vector.weight()
    assert (packed.codes.dtype, packed.scales.dtype, packed.block) == (codes, scales, block)
    inputs, outputs = packed.shape
    assert len(packed.codes.tobytes()) == -(-inputs * outputs * codes.bitwidth // 8)
    assert packed.codes.numpy().shape == (inputs, outputs)
    assert packed.scales.numpy().shape == tuple(packed.scales.shape.numpy())
    assert packed.scales.numpy().dtype == scales.numpy()
    if packed.zero_points is not None:
        assert packed.zero_points.dtype == codes
        assert packed.zero_points.numpy().shape == tuple(packed.scales.shape.numpy())
        assert (packed.zero_points.numpy() != 0).any()


@pytest.mark.parametrize("name", [*FORMS, *TABLES, "bnb-int8"])
def test_nothing_is_read_before_it_is_written(name: str, tmp_path: Path) -> None:
    vector = Vector(name, tmp_path)
    packed, _ = vector.weight()
    [tensors] = vector.modules.values()
    small = {"weight_shape", "weight_g_idx", "g_idx", "pre_quant_scale", "_weight_zero_point"}
    read = {suffix for suffix, tensor in tensors.items() if tensor.reads}
    assert {suffix for suffix in read if tensors[suffix].values.size > 1 and "quant_state" not in suffix} <= small
    packed.codes.numpy()
    packed.scales.numpy()


@pytest.mark.parametrize("name", [*FORMS, *TABLES, "bnb-int8"])
def test_written_in_parts(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Codes are the same bytes when they are unpacked 64 rows at a time."""
    packed, _ = Vector(name, tmp_path).weight()
    whole = packed.codes.tobytes()
    monkeypatch.setattr(specbuild.quantized_formats.unpack.stored, "_CHUNK", 1)
    file = io.BytesIO()
    assert isinstance(packed.codes, CodeTensor)
    packed.codes.tofile(file)
    assert file.getvalue() == whole == packed.codes.tobytes()


def in_onnx_runtime(packed: Packed, directory: Path) -> Array:
    """The weight [K, N] as ONNX Runtime dequantizes it, out of a file that onnx_ir wrote."""
    tensors = {"codes": packed.codes, "scales": packed.scales, "zero_points": packed.zero_points}
    values = {
        name: ir.Value(
            name=name, shape=ir.Shape(tensor.shape.numpy()), type=ir.TensorType(tensor.dtype), const_value=tensor
        )
        for name, tensor in tensors.items()
        if tensor is not None
    }
    for name, value in values.items():
        assert value.const_value is not None
        value.const_value.name = name
    scales = ir.node("Cast", [values["scales"]], {"to": FLOAT})
    block = {"axis": 1} if packed.block is None else {"axis": 0, "block_size": packed.block}
    zero_points = [values["zero_points"]] if "zero_points" in values else []
    weight = ir.node("DequantizeLinear", [values["codes"], scales.outputs[0], *zero_points], block)
    weight.outputs[0].name = "weight"
    graph = ir.Graph(
        [], weight.outputs, nodes=[scales, weight], initializers=list(values.values()), opset_imports={"": 24}, name="g"
    )
    path = directory / "weight.onnx"
    ir.save(ir.Model(graph, ir_version=11), path, external_data="weight.data", size_threshold_bytes=0)
    onnxruntime, options = session_options()
    [result] = onnxruntime.InferenceSession(path, options).run(None, {})
    return np.asarray(result)


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form[0] != FLOAT4])
def test_onnx_runtime_reads_the_same(name: str, tmp_path: Path) -> None:
    """Less what stands around the weight in a graph; ONNX Runtime has no float4 on a CPU."""
    packed, _ = Vector(name, tmp_path).weight()
    bare = replace(packed, channel_order=None, input_factors=None, offsets=None)
    np.testing.assert_array_equal(in_onnx_runtime(packed, tmp_path), bare.dequantize())


def test_act_order(tmp_path: Path) -> None:
    for name in ("ct-actorder", "gptq-desc-act", "gptq-v2-asym"):
        packed, _ = Vector(name, tmp_path).weight()
        assert packed.channel_order is not None
        assert sorted(packed.channel_order) == list(range(packed.shape[0]))
        assert list(packed.channel_order) != list(range(packed.shape[0]))
    for name in ("gptq", "gptq-v1-asym", "ct-w4a16"):
        assert Vector(name, tmp_path).weight()[0].channel_order is None


def test_zero_points_of_zero_are_read_from_format_gptq(tmp_path: Path) -> None:
    packed, _ = Vector("gptq-v1-asym", tmp_path).weight()
    assert packed.zero_points is not None
    assert (packed.zero_points.numpy() == 0).any()


@pytest.mark.parametrize(
    ("name", "activation"),
    [
        ("ct-w4a16", None),
        ("ct-w8a8", Activation("int8")),
        ("ct-w8a8-static", Activation("int8", 0.0123291015625)),
        ("ct-fp8", Activation("float8")),
        ("ct-fp8-static", Activation("float8", 0.0123291015625)),
        ("ct-nvfp4", Activation("float4", float(np.float32(1 / 123.5)))),
        ("ct-nvfp4a16", None),
        ("fp8-block", Activation("float8")),
        ("fp8-tensor", Activation("float8", float(np.float32(0.0345)))),
        ("fbgemm", Activation("float8")),
        ("torchao-float8", None),
        ("torchao-float8-dynamic", Activation("float8")),
        ("torchao-int8-dynamic", Activation("int8")),
        ("modelopt-nvfp4", Activation("float4", float(np.float32(0.0021)))),
        ("bnb-int8", None),
    ],
)
def test_activations(name: str, activation: Activation | None, tmp_path: Path) -> None:
    assert Vector(name, tmp_path).weight()[0].activation == activation


@pytest.mark.parametrize("name", TABLES)
def test_tables_become_int8(name: str, tmp_path: Path) -> None:
    """A value is off by at most half a step of its block: 1/254 of the block's largest value."""
    packed, expected = Vector(name, tmp_path).weight()
    assert (packed.codes.dtype, packed.scales.dtype, packed.block) == (INT8, FLOAT, TABLES[name])
    steps = np.repeat(packed.scales.numpy(), TABLES[name], axis=0)[: packed.shape[0]]
    error = np.abs(packed.dequantize() - expected)
    assert (error <= steps / 2 * (1 + 1e-5)).all()
    assert error.max() > 0
    blocks = np.abs(np.pad(expected, ((0, -packed.shape[0] % TABLES[name]), (0, 0)))).reshape(
        -1, TABLES[name], packed.shape[1]
    )
    np.testing.assert_allclose(packed.scales.numpy() * 127, blocks.max(1), rtol=1e-6)
    np.testing.assert_array_equal(packed.codes.numpy(), np.rint(expected / steps))


def test_llm_int8(tmp_path: Path) -> None:
    """The library multiplies by the largest value, then by 1/127; we round their product."""
    packed, expected = Vector("bnb-int8", tmp_path).weight()
    assert (packed.codes.dtype, packed.scales.dtype, packed.block) == (INT8, FLOAT, None)
    np.testing.assert_allclose(packed.dequantize(), expected, rtol=2**-22, atol=0)


def test_stacked_experts(tmp_path: Path) -> None:
    vector = Vector("mxfp4", tmp_path)
    [(module, tensors)] = vector.modules.items()
    assert module == "model.layers.0.mlp.experts.gate_up_proj"
    experts = vector.scheme.experts(module, tensors)
    assert not any(tensor.reads for tensor in tensors.values())
    assert len(experts) == 3
    for packed, expected in zip(experts, vector.expected[module], strict=True):
        assert (packed.codes.dtype, packed.scales.dtype, packed.block) == (FLOAT4, BFLOAT16, 32)
        np.testing.assert_array_equal(packed.dequantize(), expected.T)


def test_every_power_of_two_is_exact(tmp_path: Path) -> None:
    """Also the smallest, which is subnormal in bfloat16."""
    vector = Vector("mxfp4", tmp_path)
    exponents = np.arange(256, dtype=np.uint8)[:255].reshape(1, 255, 1)
    ones = np.full((1, 255, 1, 16), 0x22, np.uint8)
    tensors = named("experts", {"blocks": ones, "scales": exponents})
    [packed] = vector.scheme.experts("experts", tensors)
    expected = np.broadcast_to(np.exp2(np.arange(255) - 127.0), (32, 255))
    np.testing.assert_array_equal(packed.dequantize().astype(np.float64), expected)


def test_dense_modules(tmp_path: Path) -> None:
    dense = named("lm_head", {"weight": np.zeros((4, 8), np.float16)})
    for name in ("ct-w4a16", "gptq", "awq", "fp8-block", "bnb-nf4", "mxfp4", "modelopt-nvfp4", "torchao-int8"):
        assert Vector(name, tmp_path).scheme.packed("lm_head", dense) is None


def test_input_factors(tmp_path: Path) -> None:
    for name in ("modelopt-int4-awq", "modelopt-int8"):
        vector = Vector(name, tmp_path)
        packed, _ = vector.weight()
        [tensors] = vector.modules.values()
        assert packed.input_factors is not None
        np.testing.assert_array_equal(packed.input_factors, tensors["pre_quant_scale"].values.astype(np.float32))


def test_offsets_of_torchao(tmp_path: Path) -> None:
    """None where all are zero."""
    vector = Vector("torchao-int4", tmp_path)
    assert vector.weight()[0].offsets is not None
    [(module, tensors)] = vector.modules.items()
    tensors["_weight_zero_point"] = Tensor("zero", np.zeros_like(tensors["_weight_zero_point"].values))
    packed = vector.scheme.packed(module, tensors)
    assert packed is not None
    assert packed.offsets is None


def test_groups_larger_than_the_weight(tmp_path: Path) -> None:
    """A file may state any size; nothing of that size is made."""
    for name, suffix, key in (
        ("ct-w8-naive", "weight_scale", "group_size"),
        ("ct-fp8-block", "weight_scale", "block_structure"),
    ):
        vector = Vector(name, tmp_path)
        [(module, tensors)] = vector.modules.items()
        huge = 10**13
        weights = vector.config["quantization_config"]["config_groups"]["group_0"]["weights"]
        weights[key] = huge if key == "group_size" else [huge, huge]
        for changed in {suffix, "weight_zero_point"} & set(tensors):
            values = tensors[changed].values
            tensors[changed] = Tensor(changed, values[:, :1] if key == "group_size" else values[:1, :1])
        packed = vector.read().packed(module, tensors)
        assert packed is not None
        assert packed.dequantize().shape == packed.shape


def test_one_scale_with_a_zero_point() -> None:
    """A whole weight may share both (``Packed`` with shapes [])."""
    codes = ir.tensor(np.array([[1, 2, 3]], np.int8))
    packed = Packed(codes, ir.tensor(np.float32(0.5)), ir.tensor(np.int8(1)))
    np.testing.assert_array_equal(packed.dequantize(), [[0, 0.5, 1]])
