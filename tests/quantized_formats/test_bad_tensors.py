"""Tensors that contradict the configuration or each other: one line that names the file, the tensor and what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from specbuild.weights.packed import Packed
from specrun.errors import CheckpointError
from tests.helpers.stored_tensors import Array, Tensor, Vector, named

Tensors = dict[str, Tensor]
Edit = Callable[[Tensors], object]

MODULE = "model.layers.0.mlp.up_proj"


def put(suffix: str, change: Callable[[Array], Array]) -> Edit:
    """Replace a tensor by another of the same name."""

    def edit(tensors: Tensors) -> None:
        tensors[suffix] = Tensor(f"{MODULE}.{suffix}", change(tensors[suffix].values))

    return edit


def drop(suffix: str) -> Edit:
    return lambda tensors: tensors.pop(suffix)


def poison(value: float) -> Callable[[Array], Array]:
    def change(values: Array) -> Array:
        changed = values.copy()
        changed.reshape(-1)[-1] = value
        return changed

    return change


def blob(text: str) -> Callable[[Array], Array]:
    return lambda _: np.frombuffer(text.encode(), np.uint8)


def use(packed: Packed | None) -> None:
    assert packed is not None
    packed.dequantize()


CASES: list[tuple[str, str, Edit, list[str]]] = [
    # What is missing.
    ("packed weight", "ct-w4a16", drop("weight_packed"), ["no tensor 'weight_packed'"]),
    ("scales", "ct-w4a16", drop("weight_scale"), ["no tensor 'weight_scale'"]),
    ("zero points", "ct-w4a16-asym", drop("weight_zero_point"), ["no tensor 'weight_zero_point'"]),
    ("static scale", "ct-fp8-static", drop("input_scale"), ["no tensor 'input_scale'"]),
    ("global scale", "ct-nvfp4", drop("weight_global_scale"), ["no tensor 'weight_global_scale'"]),
    ("awq scales", "awq", drop("scales"), ["no tensor 'scales'"]),
    ("gptq zeros", "gptq", drop("qzeros"), ["no tensor 'qzeros'"]),
    ("fp8 scale", "fp8-block", drop("weight_scale_inv"), ["no tensor 'weight_scale_inv'"]),
    ("quant state", "bnb-nf4", drop("weight.quant_state.bitsandbytes__nf4"), ["no tensor", "quant_state"]),
    ("absmax", "bnb-nf4", drop("weight.absmax"), ["no tensor 'weight.absmax'"]),
    ("nested absmax", "bnb-nf4-double", drop("weight.nested_absmax"), ["no tensor 'weight.nested_absmax'"]),
    ("SCB", "bnb-int8", drop("SCB"), ["no tensor 'SCB'"]),
    ("torchao scale", "torchao-int8", drop("_weight_scale"), ["no tensor '_weight_scale'"]),
    ("everything", "ct-w4a16", lambda tensors: tensors.clear(), ["has no tensors of a weight"]),
    # Shapes.
    ("scales by group", "ct-w4a16", put("weight_scale", lambda a: a[:, :2]), ["weight_scale", "[24, 2]", "[24, 3]"]),
    ("transposed scales", "ct-w4a16", put("weight_scale", lambda a: a.T), ["weight_scale", "[3, 24]", "[24, 3]"]),
    ("one scale for all", "ct-w8a8", put("weight_scale", lambda a: a[:1]), ["weight_scale", "[1, 1]", "[24, 1]"]),
    ("packed zeros", "ct-w4a16-asym", put("weight_zero_point", lambda a: a[:1]), ["zero_point", "[1, 3]", "[2, 3]"]),
    ("stated shape", "ct-w4a16", put("weight_shape", lambda a: a + 9), ["weight_packed", "[33, 105] in 4 bits"]),
    ("negative shape", "ct-w4a16", put("weight_shape", lambda a: -a), ["[-24, -96]"]),
    ("shape of a shape", "ct-w4a16", put("weight_shape", lambda a: a[:1]), ["weight_shape", "[1]", "[2]"]),
    ("other bits", "ct-w8a16", put("weight_packed", lambda a: a[:, :6]), ["weight_packed", "[7, 42] in 8 bits"]),
    ("three dimensions", "ct-w4a16", put("weight_packed", lambda a: a[None]), ["two dimensions"]),
    ("empty", "ct-w4a16", put("weight_packed", lambda a: a[:0]), ["two dimensions"]),
    ("awq zeros", "awq", put("qzeros", lambda a: a[:2]), ["qzeros", "[2, 4]", "[3, 4]"]),
    ("awq scales", "awq", put("scales", lambda a: a[:, :-8]), ["scales", "[3, 24]", "[3, 32]"]),
    ("awq groups", "awq", put("qweight", lambda a: a[:80]), ["qweight", "80 input channels", "groups of 32"]),
    ("gptq zeros", "gptq", put("qzeros", lambda a: a[:, :1]), ["qzeros", "[3, 1]", "[3, 3]"]),
    ("gptq scales", "gptq", put("scales", lambda a: a[:2]), ["scales", "[2, 24]", "[3, 24]"]),
    ("gptq words", "gptq", put("qweight", lambda a: a[:-1]), ["qweight", "[11, 24]", "[12, 24]"]),
    ("fp8 blocks", "fp8-block", put("weight_scale_inv", lambda a: a[:2]), ["weight_scale_inv", "[2, 3]", "[3, 3]"]),
    ("nvfp4 groups", "ct-nvfp4", put("weight_packed", lambda a: a[:, :44]), ["88 input channels", "groups of 16"]),
    ("nf4 bytes", "bnb-nf4", put("weight", lambda a: a[:-1]), ["weight", "1536 bytes"]),
    ("nf4 blocks", "bnb-nf4", put("weight.absmax", lambda a: a[:-1]), ["absmax", "[47]", "[48]"]),
    ("nf4 table", "bnb-nf4", put("weight.quant_map", lambda a: a[:-1]), ["quant_map", "[15]", "[16]"]),
    ("pre_quant_scale", "modelopt-int8", put("pre_quant_scale", lambda a: a[:-1]), ["pre_quant_scale", "[63]", "[64]"]),
    ("input scales", "ct-fp8-static", put("input_scale", lambda a: np.repeat(a, 2)), ["input_scale", "one value"]),
    ("torchao zeros", "torchao-intx", put("_weight_zero_point", lambda a: a[:, :1]), ["zero_point", "[24, 1]"]),
    # Types.
    (
        "dense weight",
        "fp8-block",
        put("weight", lambda a: a.astype(np.float32)),
        ["weight is float32, expected float8"],
    ),
    ("words", "gptq", put("qweight", lambda a: a.astype(np.int64)), ["qweight is int64, expected int32"]),
    ("scales of integers", "gptq", put("scales", lambda a: a.astype(np.int32)), ["scales is int32, expected float16"]),
    ("e5m2", "ct-fp8", put("weight", lambda a: a.view(ml_dtypes.float8_e5m2)), ["float8_e5m2, expected float8_e4m3fn"]),
    ("float zeros", "torchao-intx", put("_weight_zero_point", lambda a: a + np.float32(0.5)), ["integer zero points"]),
    # Values.
    ("NaN", "ct-w4a16", put("weight_scale", poison(np.nan)), ["the values of", "weight_scale are not finite"]),
    ("infinite", "gptq", put("scales", poison(np.inf)), ["scales are not finite"]),
    ("NaN in float8", "ct-nvfp4", put("weight_scale", poison(np.nan)), ["weight_scale are not finite"]),
    ("NaN exponent", "ct-mxfp4", put("weight_scale", poison(255)), ["weight_scale are not finite"]),
    ("infinite block", "fp8-block", put("weight_scale_inv", poison(-np.inf)), ["weight_scale_inv are not finite"]),
    ("infinite absmax", "bnb-nf4", put("weight.absmax", poison(np.inf)), ["absmax are not finite"]),
    ("NaN weight", "ct-fp8", put("weight", poison(np.nan)), ["weight are not finite"]),
    ("NaN torchao", "torchao-float8", put("_weight_qdata", poison(np.nan)), ["_weight_qdata are not finite"]),
    ("NaN table", "bnb-nf4", put("weight.quant_map", poison(np.nan)), ["quant_map are not finite"]),
    ("large table", "bnb-nf4", put("weight.quant_map", poison(3)), ["quant_map", "beyond -1 and 1"]),
    ("NaN input scale", "ct-fp8-static", put("input_scale", poison(np.nan)), ["input_scale are not finite"]),
    ("zero input scale", "ct-fp8-static", put("input_scale", poison(0)), ["input_scale is 0", "positive"]),
    ("negative global", "ct-nvfp4", put("weight_global_scale", poison(-1)), ["global_scale is -1", "positive"]),
    ("NaN factor", "modelopt-int8", put("pre_quant_scale", poison(np.nan)), ["pre_quant_scale are not finite"]),
    ("asymmetric", "gptq", put("qzeros", lambda a: a ^ 3), ["qzeros", "sym is true", "other than 8"]),
    ("group beyond", "gptq-desc-act", put("g_idx", poison(99)), ["g_idx", "3 groups of 32 channels"]),
    ("negative group", "gptq-desc-act", put("g_idx", poison(-1)), ["g_idx", "3 groups of 32 channels"]),
    ("uneven groups", "ct-actorder", put("weight_g_idx", lambda a: a * 0), ["weight_g_idx", "3 groups of 32 channels"]),
    ("beyond 4 bits", "torchao-intx", put("_weight_qdata", poison(8)), ["_weight_qdata", "no four-bit integers"]),
    ("old layout", "bnb-int8", put("weight_format", lambda a: a + 1), ["weight_format is not 0"]),
    ("no JSON", "bnb-nf4", put("weight.quant_state.bitsandbytes__nf4", blob("\xff{")), ["no description of a weight"]),
    ("JSON list", "bnb-nf4", put("weight.quant_state.bitsandbytes__nf4", blob("[]")), ["no description of a weight"]),
    (
        "sizes of nothing",
        "bnb-nf4",
        put("weight.quant_state.bitsandbytes__nf4", blob('{"shape": [24, -128], "blocksize": 64}')),
        ["sizes that no weight has"],
    ),
    (
        "endless offset",
        "bnb-nf4",
        put(
            "weight.quant_state.bitsandbytes__nf4",
            blob('{"shape": [2, 128], "blocksize": 64, "nested_offset": 1e999}'),
        ),
        ["offset inf"],
    ),
    (
        "no block",
        "bnb-nf4",
        put("weight.quant_state.bitsandbytes__nf4", blob('{"shape": [24, 128], "blocksize": 0}')),
        ["sizes that no weight has"],
    ),
]


@pytest.mark.parametrize(("name", "edit", "fragments"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_one_line(name: str, edit: Edit, fragments: list[str], tmp_path: Path) -> None:
    vector = Vector(name, tmp_path)
    [(module, tensors)] = vector.modules.items()
    edit(tensors)
    with pytest.raises(CheckpointError) as caught:
        use(vector.scheme.packed(module, tensors))
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith(f"{vector.file}: ")
    assert line.endswith(("download both again", "download them again"))
    for fragment in fragments:
        assert fragment in line, line


def test_said_to_be_quantized_and_dense(tmp_path: Path) -> None:
    vector = Vector("ct-w4a16", tmp_path)
    dense = named(MODULE, {"weight": np.zeros((4, 8), np.float16)})
    with pytest.raises(CheckpointError, match=r"weight is float16, though .* is said to be quantized"):
        vector.scheme.packed(MODULE, dense)


@pytest.mark.parametrize("name", ["ct-w4a16", "awq", "bnb-nf4", "fp8-block", "modelopt-nvfp4"])
def test_said_to_be_dense_and_quantized(name: str, tmp_path: Path) -> None:
    vector = Vector(name, tmp_path)
    if name == "awq":
        vector.config["quantization_config"]["modules_to_not_convert"] = ["lm_head"]
    [tensors] = vector.modules.values()
    with pytest.raises(CheckpointError, match="lm_head is said not to be quantized, and yet it has"):
        vector.read().packed("lm_head", tensors)


def test_no_quantized_tensor_at_all(tmp_path: Path) -> None:
    for name in ("ct-w4a16", "gptq", "bnb-nf4", "mxfp4", "torchao-int8", "modelopt-fp8"):
        vector = Vector(name, tmp_path)
        vector.scheme.require_quantized(vector.names)
        with pytest.raises(CheckpointError, match=r"says that weights are quantized .* and no tensor is"):
            vector.scheme.require_quantized(["model.layers.0.mlp.up_proj.weight", "model.norm.weight"])


@pytest.mark.parametrize(
    ("edit", "fragment"),
    [
        (drop("scales"), "no tensor 'scales'"),
        (put("blocks", lambda a: a[..., :8]), "expected [experts, outputs, groups, 16]"),
        (put("scales", lambda a: a[:2]), "of shape [2, 10, 2], expected [3, 10, 2]"),
        (put("scales", lambda a: a.astype(np.int32)), "scales is int32, expected uint8"),
        (put("scales", poison(255)), "are not finite"),
    ],
)
def test_bad_experts(edit: Edit, fragment: str, tmp_path: Path) -> None:
    vector = Vector("mxfp4", tmp_path)
    [(module, tensors)] = vector.modules.items()
    edit(tensors)
    with pytest.raises(CheckpointError) as caught:
        for packed in vector.scheme.experts(module, tensors):
            use(packed)
    assert fragment in str(caught.value)


def test_experts_that_are_no_experts(tmp_path: Path) -> None:
    vector = Vector("mxfp4", tmp_path)
    with pytest.raises(CheckpointError, match="not said to be stacked in MXFP4"):
        vector.scheme.experts("model.layers.0.self_attn", {})
    [(module, tensors)] = vector.modules.items()
    with pytest.raises(CheckpointError, match="no tensor 'weight_packed'"):
        vector.scheme.packed(module, tensors)
