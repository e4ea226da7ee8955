"""What ``quantization_config`` and hf_quant_config.json say: forms of modules, and errors in one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specbuild.quantized_formats.config.refused import REFUSED
from specbuild.quantized_formats.config.scheme import CACHE_SCALES, KVCache, Scheme
from specbuild.quantized_formats.config.schemes import METHODS, read_scheme
from specbuild.quantized_formats.formats import CHANNEL, WHOLE, Form
from specbuild.quantized_formats.from_torch import FromTorch
from specrun.errors import CheckpointError, UnsupportedModelError
from tests.helpers.stored_tensors import Tensor

Json = dict[str, Any]

PROJ = "model.layers.3.mlp.up_proj"
GROUP: Json = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128, "symmetric": True}
FLOAT: Json = {"num_bits": 8, "type": "float", "strategy": "channel"}


def scheme(config: Json, directory: Path = Path("model")) -> Scheme:
    found = read_scheme(directory, {"quantization_config": config})
    assert found is not None
    return found


def tensors(*groups: Json, **others: Any) -> Json:
    """A configuration of compressed-tensors."""
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {f"group_{index}": group for index, group in enumerate(groups)},
        **others,
    }


def modelopt(directory: Path, **quantization: Any) -> Scheme:
    (directory / "hf_quant_config.json").write_text(json.dumps({"quantization": quantization}))
    found = read_scheme(directory, {})
    assert found is not None
    return found


def test_not_quantized(tmp_path: Path) -> None:
    assert read_scheme(tmp_path, {}) is None
    assert read_scheme(tmp_path, {"quantization_config": None, "quantization_config_old": 3}) is None


def test_targets_of_compressed_tensors() -> None:
    """A name goes before a pattern, a pattern before a class; what is ignored goes before all."""
    found = scheme(
        tensors(
            {"targets": ["Linear"], "weights": GROUP},
            {
                "targets": ["re:.*down_proj$"],
                "weights": {**GROUP, "num_bits": 8, "strategy": "channel", "group_size": -1},
            },
            {"targets": ["model.layers.0.mlp.down_proj"], "weights": {**GROUP, "symmetric": False}},
            {"targets": ["LlamaAttention"], "input_activations": FLOAT},
            ignore=["lm_head", r"re:.*\.gate$"],
        )
    )
    assert found.form(PROJ) == Form("pack-quantized", 4, (1, 128))
    assert found.form("model.layers.1.mlp.down_proj") == Form("pack-quantized", 8, CHANNEL)
    assert found.form("model.layers.0.mlp.down_proj") == Form("pack-quantized", 4, (1, 128), symmetric=False)
    assert found.form("lm_head") is None
    assert found.form("model.layers.0.mlp.gate") is None
    assert found.form("model.layers.0.mlp.gate_proj") is not None


def test_only_what_is_targeted_is_quantized() -> None:
    found = scheme(tensors({"targets": ["re:.*self_attn.*"], "weights": GROUP}))
    assert found.form("model.layers.0.self_attn.q_proj") is not None
    assert found.form(PROJ) is None


def test_formats_of_groups() -> None:
    found = scheme(
        tensors(
            {"targets": ["Linear"], "weights": FLOAT, "format": "float-quantized"},
            {"targets": ["re:.*up_proj"], "weights": GROUP, "format": "pack-quantized"},
            {"targets": ["Embedding"], "weights": GROUP, "format": "pack-quantized"},
            format="mixed-precision",
        )
    )
    assert found.form(PROJ) == Form("pack-quantized", 4, (1, 128))
    assert found.form("model.layers.3.mlp.down_proj") == Form("float8", 8, CHANNEL)


@pytest.mark.parametrize(
    ("weights", "block"),
    [
        ({"strategy": "tensor"}, WHOLE),
        ({}, WHOLE),
        ({"strategy": "channel"}, CHANNEL),
        ({"group_size": -1}, CHANNEL),
        ({"group_size": 64}, (1, 64)),
        ({"strategy": "block", "block_structure": [128, 64]}, (128, 64)),
    ],
)
def test_strategies(weights: Json, block: tuple[int | None, int | None]) -> None:
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", **weights}}
    form = scheme(tensors(group, format="float-quantized")).form(PROJ)
    assert form is not None
    assert form.block == block


@pytest.mark.parametrize(
    ("inputs", "activation", "static", "note"),
    [
        (None, None, False, None),
        ({"num_bits": 8, "type": "int", "dynamic": True, "strategy": "token"}, "int8", False, None),
        ({"num_bits": 8, "type": "float", "dynamic": False, "strategy": "tensor"}, "float8", True, None),
        (
            {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "group", "group_size": 128},
            "float8",
            False,
            "token",
        ),
        ({"num_bits": 8, "type": "int", "dynamic": True, "symmetric": False}, None, False, "zero points"),
        ({"num_bits": 4, "type": "int", "dynamic": True, "strategy": "token"}, None, False, "4-bit int keep"),
        ({"num_bits": 4, "type": "float", "dynamic": "local", "strategy": "tensor_group"}, "float4", True, None),
    ],
)
def test_activations(inputs: Json | None, activation: str | None, static: bool, note: str | None) -> None:
    group = {"targets": ["Linear"], "weights": GROUP, "input_activations": inputs}
    found = scheme(tensors(group))
    form = found.form(PROJ)
    assert form is not None
    assert (form.activation, form.static) == (activation, static)
    assert [note in said for said in found.notes] == ([] if note is None else [True]) if note else not found.notes


def test_gptq_with_settings_of_its_own_for_some_modules() -> None:
    config = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "sym": True,
        "dynamic": {r"-:.*\.gate$": {}, r"+:.*down_proj": {"bits": 8, "group_size": -1}, r".*k_proj": {"sym": False}},
    }
    found = scheme(config)
    assert found.form(PROJ) == Form("gptq", 4, (1, 128))
    assert found.form("model.layers.0.mlp.gate") is None
    assert found.form("model.layers.0.mlp.down_proj") == Form("gptq", 8, CHANNEL)
    assert found.form("model.layers.0.self_attn.k_proj") == Form("gptq", 4, (1, 128), symmetric=False)


def test_names_that_are_not_converted() -> None:
    """As transformers reads them: from the start to a dot, as a pattern, or as an ending."""
    config = {"quant_method": "awq", "bits": 4, "group_size": 64, "modules_to_not_convert": ["model.layers.1", "gate"]}
    found = scheme({**config, "modules_to_not_convert": ["model.layers.1", "mlp.gate", "model.layers.*.self_attn"]})
    assert found.form("model.layers.1.mlp.up_proj") is None
    assert found.form("model.layers.11.mlp.up_proj") == Form("awq", 4, (1, 64), symmetric=False)
    assert found.form("model.layers.11.mlp.gate") is None
    assert found.form("model.layers.11.mlp.gate_proj") is not None
    assert found.form("model.layers.11.self_attn.q_proj") is None


def test_older_names_of_awq() -> None:
    found = scheme({"quant_method": "awq", "w_bit": 4, "q_group_size": -1, "version": "GEMM"})
    assert found.form(PROJ) == Form("awq", 4, CHANNEL, symmetric=False)


@pytest.mark.parametrize(
    ("config", "form"),
    [
        ({"weight_block_size": [128, 128]}, Form("float8", 8, (128, 128), activation="float8")),
        ({"weight_block_size": None}, Form("float8", 8, WHOLE, activation="float8")),
        ({"activation_scheme": "static"}, Form("float8", 8, WHOLE, activation="float8", static=True)),
        ({"quant_method": "mxfp8"}, Form("float8", 8, (1, 32), activation="float8")),
    ],
)
def test_fp8(config: Json, form: Form) -> None:
    found = scheme({"quant_method": "fp8", "ignored_layers": ["lm_head"], **config})
    assert found.form(PROJ) == form
    assert found.form("lm_head") is None


@pytest.mark.parametrize(
    ("algorithm", "form"),
    [
        ("FP8", Form("float8", 8, WHOLE, activation="float8", static=True)),
        ("FP8_PER_CHANNEL_PER_TOKEN", Form("float8", 8, CHANNEL, activation="float8")),
        ("NVFP4", Form("nvfp4", 4, (1, 16), activation="float4", static=True)),
        ("W4A16_NVFP4", Form("nvfp4", 4, (1, 16))),
        ("W8A8_SQ_PER_CHANNEL", Form("int8", 8, CHANNEL, activation="int8", static=True)),
    ],
)
def test_modelopt(algorithm: str, form: Form, tmp_path: Path) -> None:
    """Wildcards, whole subtrees and the cache."""
    excluded = ["lm_head", "model.layers.0.*", "model.layers.1.self_attn"]
    found = modelopt(tmp_path, quant_algo=algorithm, kv_cache_quant_algo="FP8", exclude_modules=excluded)
    assert found.form(PROJ) == form
    for name in ("lm_head", "model.layers.0.mlp.up_proj", "model.layers.1.self_attn.q_proj"):
        assert found.form(name) is None
    assert found.form("model.layers.10.mlp.up_proj") == form
    assert found.kv_cache == KVCache("float8", static=True)


def test_modelopt_with_several_forms(tmp_path: Path) -> None:
    layers = {PROJ: {"quant_algo": "FP8"}, "model.layers.*.down_proj": {"quant_algo": "W4A16_AWQ", "group_size": 64}}
    found = modelopt(tmp_path, quant_algo="MIXED_PRECISION", quantized_layers=layers)
    assert found.form(PROJ) == Form("float8", 8, WHOLE, activation="float8", static=True)
    assert found.form("model.layers.2.mlp.down_proj") == Form("modelopt-int4", 4, (1, 64))
    assert found.form("model.layers.2.mlp.up_proj") is None
    assert found.kv_cache is None


def test_modelopt_in_config_json() -> None:
    found = scheme({"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"], "kv_cache_scheme": None})
    assert found.form(PROJ) is not None
    assert found.form("lm_head") is None
    cache = {"num_bits": 8, "type": "float", "dynamic": False}
    found = scheme({"quant_algo": "FP8", "kv_cache_scheme": cache})
    assert found.kv_cache == KVCache("float8", static=True)


def test_cache_of_compressed_tensors() -> None:
    group = {"targets": ["Linear"], "weights": GROUP}
    assert scheme(tensors(group)).kv_cache is None
    found = scheme(tensors(group, kv_cache_scheme={"num_bits": 8, "type": "int", "dynamic": True}))
    assert found.kv_cache == KVCache("int8", static=False)
    name = f"model.layers.0.self_attn.{CACHE_SCALES[0]}"
    assert found.split(name) is None
    assert found.cache_scales(Tensor(name, np.array([0.25], np.float16)), 2).tolist() == [0.25, 0.25]
    each = np.array([0.25, 0.5], np.float32)
    assert found.cache_scales(Tensor(name, each.reshape(2, 1, 1)), 2).tolist() == [0.25, 0.5]
    with pytest.raises(CheckpointError, match=r"k_scale of shape \[2\], expected \[3, 1, 1\]"):
        found.cache_scales(Tensor(name, each), 3)
    with pytest.raises(CheckpointError, match="k_scale is -1, expected a positive scale"):
        found.cache_scales(Tensor(name, np.array(-1, np.float32)), 2)


def test_bitsandbytes_says_what_it_costs() -> None:
    for config in ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, {"load_in_8bit": True}):
        [note] = scheme(config).notes
        assert note


def test_names_of_tensors() -> None:
    found = scheme({"quant_method": "bitsandbytes", "load_in_4bit": True})
    assert found.split(f"{PROJ}.weight") == (PROJ, "weight")
    assert found.split(f"{PROJ}.weight.absmax") == (PROJ, "weight.absmax")
    state = "weight.quant_state.bitsandbytes__nf4"
    assert found.split(f"{PROJ}.{state}") == (PROJ, state)
    assert found.split(f"{PROJ}.bias") is None
    assert scheme({"quant_method": "mxfp4"}).split("a.experts.down_proj_blocks") == ("a.experts.down_proj", "blocks")


@pytest.mark.parametrize(
    ("config", "fragments"),
    [
        (["int4"], ["quantization_config ['int4']: expected an object"]),
        ({"quant_method": 3}, ["quantization_config.quant_method 3: expected a text"]),
        ({"quant_method": None, "x": 1}, ["quant_method is missing: expected the name of a method"]),
        ({"quant_method": "mystery\n" * 40}, ["quant_method 'mystery\\n", "is not known", "gptq"]),
        ({"quant_method": "gptq", "bits": 4.0}, ["quantization_config.bits 4.0: expected an integer"]),
        ({"quant_method": "gptq", "bits": True}, ["quantization_config.bits True: expected an integer"]),
        ({"quant_method": "gptq"}, ["quantization_config.bits is missing: expected an integer"]),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, ["group_size 0: expected a positive number"]),
        ({"quant_method": "gptq", "bits": 4, "group_size": 1 << 40}, ["group_size 1099511627776: expected"]),
        ({"quant_method": "gptq", "bits": 4, "sym": "yes"}, ["sym 'yes': expected true or false"]),
        ({"quant_method": "gptq", "bits": 4, "dynamic": []}, ["dynamic []: expected an object"]),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"(": {}}}, ["dynamic.(", "no regular expression"]),
        ({"quant_method": "awq", "bits": 4, "modules_to_not_convert": "x"}, ["'x': expected a list of names"]),
        ({"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["["]}, ["modules_to_not_convert", "no regular"]),
        ({"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["x" * 501]}, ["at most 500 characters"]),
        ({"quant_method": "fp8", "weight_block_size": [128]}, ["weight_block_size [128]: expected two positive"]),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, ["weight_block_size [0, 128]: expected two positive"]),
        ({"quant_method": "bitsandbytes"}, ["load_in_4bit is missing: expected true"]),
        (tensors(), ["config_groups {}: expected an object with at least one group"]),
        (tensors({"targets": 1, "weights": GROUP}), ["config_groups.group_0.targets 1: expected a list of names"]),
        (tensors({"targets": ["re:("], "weights": GROUP}), ["group_0.targets", "'(' is no regular expression"]),
        (
            tensors({"targets": [], "weights": {**GROUP, "group_size": None}}),
            ["group_size is missing: expected a positive"],
        ),
        (tensors({"targets": [], "weights": {**GROUP, "type": "float"}}), ["type 'float': expected 'int', for format"]),
        (
            tensors({"targets": [], "weights": {**FLOAT, "strategy": "block"}}, format="float-quantized"),
            ["block_structure is missing: expected two positive integers"],
        ),
        (
            tensors(
                {"targets": [], "weights": {**GROUP, "type": "float", "group_size": 32}}, format="nvfp4-pack-quantized"
            ),
            ["group_size 32: expected 16"],
        ),
    ],
)
def test_wrong_values(config: Any, fragments: list[str], tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        read_scheme(tmp_path, {"quantization_config": config})
    line = str(caught.value)
    assert "\n" not in line
    assert line.startswith(f"{tmp_path / 'config.json'}: quantization_config")
    for fragment in fragments:
        assert fragment in line, line


@pytest.mark.parametrize(
    ("config", "fragment"),
    [
        ({"quant_method": "gptq", "bits": 3}, "bits 3: GPTQ is read in 4 and 8 bits"),
        ({"quant_method": "gptq", "bits": 2}, "bits 2: GPTQ is read in 4 and 8 bits"),
        (
            {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
            "checkpoint_format 'marlin': specbuild reads",
        ),
        ({"quant_method": "gptq", "bits": 4, "pack_dtype": "int64"}, "pack_dtype 'int64'"),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, "is_marlin_format True"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*": {"bits": 3}}}, "bits 3: GPTQ is read in 4 and 8"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv': specbuild reads gemm"),
        ({"quant_method": "awq", "bits": 3}, "bits 3: AWQ is read in 4 bits"),
        ({"quant_method": "awq", "bits": 4, "zero_point": False}, "zero_point False"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2'"),
        ({"quant_method": "fp8", "expert_dtype": "fp4"}, "expert_dtype 'fp4'"),
        ({"quant_algo": "NVFP4_SVD"}, "quant_algo 'NVFP4_SVD': specbuild reads fp8"),
        (
            tensors({"targets": [], "weights": {**GROUP, "num_bits": 3}}),
            "num_bits 3: pack-quantized is read in 4 and 8",
        ),
        (tensors({"targets": [], "weights": GROUP}, format="marlin-24"), "format 'marlin-24': specbuild reads"),
        (tensors({"targets": [], "weights": GROUP}, transform_config={"a": 1}), "inputs are rotated"),
        (tensors({"targets": [], "weights": GROUP}, sparsity_config={"format": "sparse-24-bitmask"}), "sparse-24"),
        (
            tensors(
                {
                    "targets": [],
                    "weights": FLOAT,
                    "input_activations": {"num_bits": 8, "type": "float", "dynamic": False, "strategy": "group"},
                },
                format="float-quantized",
            ),
            "a fixed scale is read for the whole input",
        ),
    ],
)
def test_refused_by_name(config: Json, fragment: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        read_scheme(tmp_path, {"quantization_config": config})
    line = str(caught.value)
    assert fragment in line, line
    assert line.endswith("; give the checkpoint as it was before quantization")


@pytest.mark.parametrize("method", sorted(REFUSED))
def test_recognised_and_not_read(method: str, tmp_path: Path) -> None:
    config: Json = {"quant_method": method, "bits": 4}
    with pytest.raises(UnsupportedModelError, match="weights are quantized") as caught:
        read_scheme(tmp_path, {"quantization_config": config})
    assert any(word in str(caught.value) for word in ("; give ", ", or ", "; export ", "; quantize "))
    assert method not in METHODS


def test_mlx_does_not_name_itself(tmp_path: Path) -> None:
    config = {"group_size": 64, "bits": 4}
    for key in ("quantization", "quantization_config"):
        with pytest.raises(UnsupportedModelError, match="MLX"):
            read_scheme(tmp_path, {key: config})


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("{", "not readable JSON"),
        ("[]", "expected a JSON object"),
        ("{}", "'quantization' is missing: expected an object"),
        ('{"quantization": {"quant_algo": null}}', "quantization.quant_algo is missing: expected a text"),
        (
            '{"quantization": {"quant_algo": "FP8", "exclude_modules": {}}}',
            "exclude_modules {}: expected a list of names",
        ),
        ('{"quantization": {"quant_algo": "NVFP4", "group_size": 32}}', "group_size 32: expected 16, for NVFP4"),
        ('{"quantization": {"quant_algo": "MIXED_PRECISION"}}', "quantized_layers is missing: expected an object"),
    ],
)
def test_bad_file_of_modelopt(text: str, fragment: str, tmp_path: Path) -> None:
    (tmp_path / "hf_quant_config.json").write_text(text)
    with pytest.raises(CheckpointError) as caught:
        read_scheme(tmp_path, {})
    line = str(caught.value)
    assert line.startswith(f"{tmp_path / 'hf_quant_config.json'}: ")
    assert fragment in line, line


def write_header(path: Path, metadata: Json) -> None:
    text = json.dumps({"__metadata__": metadata}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text)


@pytest.mark.parametrize(
    ("metadata", "fragment"),
    [
        ({}, "no torchao tensors in it; save it again as safetensors"),
        ({"a.weight": "{"}, "no torchao tensors in it"),
        ({"a.weight": '{"_type": "Int8Tensor"}'}, "'a.weight' has no '_data'"),
        ({"a.weight": '{"_type": "Int8Tensor", "_data": {"block_size": [0, 1]}}'}, "block_size [0, 1]: expected two"),
        (
            {"a.experts": '{"_type": "Int8Tensor", "_data": {}}'},
            "a.experts is quantized, and no weight of a linear layer",
        ),
        ({"a.weight": '{"_type": "Int4TilePackedTo4dTensor", "_data": {}}'}, "laid out for kernels of its own"),
        (
            {"a.weight": '{"_type": "IntxUnpackedToInt8Tensor", "_data": {"target_dtype": {"_data": "uint7"}}}'},
            "target_dtype",
        ),
    ],
)
def test_bad_headers_of_torchao(metadata: Json, fragment: str, tmp_path: Path) -> None:
    write_header(tmp_path / "model.safetensors", metadata)
    with pytest.raises(CheckpointError) as caught:
        read_scheme(tmp_path, {"quantization_config": {"quant_method": "torchao"}})
    assert fragment in str(caught.value)
    assert "\n" not in str(caught.value)


def test_torchao_in_pickles(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin is pickled, which can run code when read"):
        read_scheme(tmp_path, {"quantization_config": {"quant_method": "torchao"}})
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(CheckpointError, match="too short for its safetensors header"):
        read_scheme(tmp_path, {"quantization_config": {"quant_method": "torchao"}})


class Torch:
    """As ``specbuild.weights.lazy_tensors.StoredTensor``."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values
        self.shape = tuple(values.shape)
        self.dtype = values.dtype

    def read(self, index: tuple[slice, ...], dtype: torch.dtype) -> torch.Tensor:
        assert len(index) == len(self.shape)
        return self.values[index].to(dtype)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.int8, torch.uint8, torch.int32]
)
def test_tensors_of_torch(dtype: torch.dtype) -> None:
    values = torch.arange(12).reshape(3, 4)
    tensor = FromTorch("a.weight", Torch(values.to(dtype)))
    assert tensor.name == "a.weight"
    assert tensor.read().dtype == tensor.dtype
    np.testing.assert_array_equal(tensor.read().astype(np.int64), values.numpy())
    np.testing.assert_array_equal(tensor.read((slice(None), slice(1, 3))).astype(np.int64), values[:, 1:3].numpy())
    scalar = FromTorch("a.scale", Torch(torch.tensor(3).to(dtype)))
    assert scalar.shape == () == scalar.read().shape
    assert int(scalar.read()) == 3
