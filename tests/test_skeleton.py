"""Models without weights: each weight that is read later is what transformers loads, and large ones are cut right."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from specbuild.export.exporter import cache_shapes
from specbuild.export.skeleton import Skeleton, load_skeleton
from specbuild.reference import far_reference, reference_logits
from specbuild.tensors import Reader, StoredTensor, WeightTensor
from specbuild.verify import compare
from specbuild.weights import check_weights
from specrun.engine_dir import GRAPH_NAME, GraphInfo
from specrun.errors import CheckpointError
from tests.conftest import make_onnx
from tests.families import FAMILIES, POSITIONS, SIZES, save_checkpoint

EXPERTS: dict[str, Any] = {"moe_intermediate_size": 32, "num_experts_per_tok": 2}
MORE: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, num_experts=4),
    "gpt_oss": lambda: transformers.GptOssConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2, head_dim=16),
    "phimoe": lambda: transformers.PhimoeConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "glm4": lambda: transformers.Glm4Config(**SIZES, head_dim=16),
    "starcoder2": lambda: transformers.Starcoder2Config(**SIZES),
}
"""Families whose files differ from their models in other ways."""


def save(directory: Path, family: str) -> Path:
    if family in FAMILIES:
        return save_checkpoint(directory, family, shards=family == "mixtral")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(MORE[family]()).save_pretrained(directory)
    return directory


def stored(directory: Path) -> dict[str, Reader]:
    return {name: StoredTensor(entry) for name, entry in check_weights(directory).entries.items()}


def skeleton(directory: Path, dtype: str = "auto") -> Skeleton:
    config = transformers.AutoConfig.from_pretrained(directory)
    return load_skeleton(directory, config, dtype, False, stored(directory))


def loaded(directory: Path, dtype: str = "auto") -> PreTrainedModel:
    model: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )
    model.eval()
    return model  # type: ignore[no-any-return]


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is read, written and multiplied in many parts."""
    monkeypatch.setattr("specbuild.tensors._PART", 1 << 10)
    monkeypatch.setattr("specbuild.reference.SLICE", 1 << 10)
    monkeypatch.setattr("specbuild.verify.SLICE", 1 << 10)
    monkeypatch.setattr("specbuild.verify._PIECE", 1 << 10)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", [*FAMILIES, *MORE])
def test_weights_are_those_that_transformers_loads(family: str, dtype: str, tmp_path: Path, small_parts: None) -> None:
    checkpoint = save(tmp_path, family)
    model, weights = skeleton(checkpoint, dtype)
    expected = loaded(checkpoint, dtype)
    assert weights.keys() == expected.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(weights[name][...], tensor), name
        assert written(WeightTensor(weights[name], name)) == bytes_of(tensor)
        for axes in ((1, 0), (0, 2, 1)):
            if len(axes) == tensor.dim():
                turned = WeightTensor(weights[name], name).transposed(axes, name)
                assert written(turned) == turned.tobytes() == bytes_of(tensor.permute(axes)), (name, axes)
    buffers = dict(expected.named_buffers())
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, buffers[name]), name
    own = {name: id(parameter) for name, parameter in model.named_parameters(remove_duplicate=False)}
    theirs = {name: id(parameter) for name, parameter in expected.named_parameters(remove_duplicate=False)}
    for name in own:
        for other in own:
            assert (own[name] == own[other]) == (theirs[name] == theirs[other]), "tied where transformers ties"


def written(tensor: WeightTensor) -> bytes:
    file = io.BytesIO()
    tensor.tofile(file)
    return file.getvalue()


def bytes_of(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())


@pytest.mark.parametrize("family", ["llama3", "gemma2", "mixtral", "qwen3_moe", "gpt_oss", "phi3", "gpt2"])
def test_the_reference_is_the_models_own(family: str, tmp_path: Path, small_parts: None) -> None:
    checkpoint = save(tmp_path, family)
    streamed, whole = skeleton(checkpoint, "bfloat16").model, loaded(checkpoint, "bfloat16")
    info = GraphInfo(vocab_size=320, dtype="bfloat16", caches=cache_shapes(streamed))
    assert info.caches == cache_shapes(whole)
    near = [reference_logits(model, 320, POSITIONS).logits for model in (streamed, whole)]
    np.testing.assert_allclose(near[0], near[1], atol=1e-5)
    ours, theirs = (far_reference(model, info, POSITIONS) for model in (streamed, whole))
    assert (ours is None) == (theirs is None)
    if ours and theirs:
        np.testing.assert_allclose(ours.logits, theirs.logits, atol=1e-5)


def test_weights_stored_twice(tmp_path: Path) -> None:
    """Tied where both are equal, as transformers does it; else each is itself."""
    weights = save_checkpoint(tmp_path, "qwen2") / "model.safetensors"
    tensors = load_file(weights)
    for change, tied in ((0.0, True), (1.0, False)):
        head = tensors["model.embed_tokens.weight"].clone()
        head[-1, -1] += change
        save_file({**tensors, "lm_head.weight": head}, weights, {"format": "pt"})
        model: Any = skeleton(tmp_path).model
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        assert torch.equal(model.lm_head.weight.source[...], head)
        before = loaded(tmp_path)
        assert (before.lm_head.weight is before.model.embed_tokens.weight) == tied


def test_matrices_take_no_memory(tmp_path: Path) -> None:
    model, weights = skeleton(save_checkpoint(tmp_path, "mixtral"))
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    assert matrices
    assert all(parameter.untyped_storage().nbytes() == parameter.itemsize for parameter in matrices)
    assert len({parameter.data_ptr() for parameter in matrices}) == len(matrices)
    assert all(torch.equal(p, weights[name][...]) for name, p in model.named_parameters() if p.dim() == 1)


@pytest.mark.parametrize("family", ["llama3.2", "mixtral", "gemma3"])
def test_parts_and_pieces_make_no_difference(family: str, tmp_path: Path, small_parts: None) -> None:
    """A graph that is written in parts, then compared in pieces with its products in slices."""
    checkpoint = save_checkpoint(tmp_path / "hf", family)
    make_onnx(checkpoint, tmp_path / "onnx", dtype="float16")  # Verified.
    model = skeleton(checkpoint, "float16").model
    info = GraphInfo(vocab_size=320, dtype="float16", caches=cache_shapes(model))
    right = reference_logits(model, 320, POSITIONS)
    assert compare(tmp_path / "onnx" / GRAPH_NAME, info, [right]) < 1e-4


def test_a_file_that_becomes_shorter(tmp_path: Path) -> None:
    weights = skeleton(save_checkpoint(tmp_path, "llama3")).weights
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(CheckpointError, match="became shorter while it was read"):
        weights["lm_head.weight"][...]
