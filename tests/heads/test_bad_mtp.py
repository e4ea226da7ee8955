"""Targets whose multi-token prediction layer is not there or is not read: one line, and nothing written."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specbuild.head_formats.detect import read_head
from tests.helpers.command_errors import says
from tests.helpers.heads.errors import head_error, own_error
from tests.helpers.heads.mtp import LAYERS, change_config, save_mtp_target

PREFIX = f"model.layers.{LAYERS}."
FIELD = "num_nextn_predict_layers"


@pytest.fixture(scope="module")
def mtp_target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_mtp_target(tmp_path_factory.mktemp("mtp") / "hf", "glm4_moe")


@pytest.fixture
def copied(mtp_target: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(mtp_target, tmp_path / "copy"))


CONFIGS: list[tuple[dict[str, Any], list[str]]] = [
    ({FIELD: 0}, [FIELD, "has no multi-token prediction layer"]),
    ({FIELD: 2}, [f"{FIELD} 2", "one multi-token prediction layer"]),
    ({FIELD: "one"}, [f"{FIELD} 'one'"]),
    ({"model_type": "exaone_moe"}, ["'exaone_moe'", "deepseek_v3 and glm4_moe"]),
    ({"num_hidden_layers": LAYERS + 1}, [f"model.layers.{LAYERS + 1}.*", "came without"]),
]


@pytest.mark.parametrize(("changes", "said"), CONFIGS, ids=[one[1][0] for one in CONFIGS])
def test_layers_that_are_not_read(copied: Path, tmp_path: Path, changes: dict[str, Any], said: list[str]) -> None:
    change_config(copied, **changes)
    says(head_error(copied, copied, tmp_path / "out"), copied, *said)


def change_tensors(directory: Path, **changes: torch.Tensor | None) -> None:
    """changes: by names behind ``PREFIX``; None removes a tensor."""
    path = directory / "model.safetensors"
    tensors = {**load_file(path), **{PREFIX + name: tensor for name, tensor in changes.items()}}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, path, {"format": "pt"})


TENSORS: list[tuple[str, torch.Tensor | None, str]] = [
    ("eh_proj.weight", None, "eh_proj.weight is missing"),
    ("shared_head.norm.weight", None, "post_norm.weight is missing"),
    ("mlp.gate.e_score_correction_bias", None, "e_score_correction_bias is missing"),
    ("eh_proj.weight", torch.zeros(64, 64), "eh_proj.weight is [64, 64]"),
    ("more.weight", torch.zeros(64, 64), "more.weight is not part"),
]


@pytest.mark.parametrize(("name", "tensor", "said"), TENSORS, ids=[one[2] for one in TENSORS])
def test_tensors_that_do_not_fit(
    copied: Path, tmp_path: Path, name: str, tensor: torch.Tensor | None, said: str
) -> None:
    change_tensors(copied, **{name: tensor})
    says(own_error(copied, copied, tmp_path / "out"), copied, said)


def test_the_layer_of_another_target(mtp_target: Path, target: Path, tmp_path: Path) -> None:
    says(head_error(target, mtp_target, tmp_path / "out"), mtp_target, "glm4_moe", "llama", "another target")


def test_quantized_tensors_are_read_as_dense_ones(copied: Path) -> None:
    codes, scales = torch.randn(64, 128).to(torch.float8_e4m3fn), torch.tensor([[0.25]])
    change_tensors(copied, **{"eh_proj.weight": codes, "eh_proj.weight_scale_inv": scales})
    change_config(
        copied,
        quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    )
    tensors = read_head(copied).tensors
    assert f"{PREFIX}eh_proj.weight_scale_inv" not in tensors
    read = tensors[f"{PREFIX}eh_proj.weight"].read((slice(None), slice(None)), torch.float32)
    assert (read == codes.float() * 0.25).all()
