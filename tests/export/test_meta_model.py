"""Models without weights: each weight that is read later is what transformers loads, and large ones are cut right."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
import transformers
from onnx_ir.tensor_adapters import TorchTensor
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import Chunk, Concatenate, WeightConverter

from specbuild.convert.verify import compare
from specbuild.export.exporter import PREFIX
from specbuild.export.meta_model import MetaModel, load_meta_model
from specbuild.export.model_memory import model_memory
from specbuild.export.reference import far_reference, reference_logits
from specbuild.weights.lazy_tensors import Reader, StoredTensor, Weight, WeightTensor, bind
from specbuild.weights.safetensors_files import check_weights
from specbuild.weights.weight_map import find_origins
from specrun.engine_dir.config import GRAPH_NAME, GraphInfo
from specrun.errors import CheckpointError, UnsupportedModelError
from tests.helpers.engines import make_onnx
from tests.helpers.families import FAMILIES, POSITIONS, SIZES, save_checkpoint

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


def meta_model(directory: Path, dtype: str = "auto") -> MetaModel:
    config = transformers.AutoConfig.from_pretrained(directory)
    return load_meta_model(directory, config, dtype, False, stored(directory))


def loaded(directory: Path, dtype: str = "auto") -> PreTrainedModel:
    model: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )
    model.eval()
    return model  # type: ignore[no-any-return]


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is read, written and multiplied in many parts."""
    monkeypatch.setattr("specbuild.weights.lazy_tensors._PART", 1 << 12)
    monkeypatch.setattr("specbuild.export.reference.SLICE", 1 << 10)
    monkeypatch.setattr("specbuild.convert.verify.SLICE", 1 << 10)
    monkeypatch.setattr("specbuild.convert.verify._PIECE", 1 << 10)


@pytest.mark.parametrize("family", [*FAMILIES, *MORE])
def test_weights_are_those_that_transformers_loads(family: str, tmp_path: Path, small_parts: None) -> None:
    checkpoint = save(tmp_path, family)
    model, weights = meta_model(checkpoint, "bfloat16")
    expected = loaded(checkpoint, "bfloat16")
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
    streamed, whole = meta_model(checkpoint, "bfloat16").model, loaded(checkpoint, "bfloat16")
    info = GraphInfo(vocab_size=320, dtype="bfloat16", caches=model_memory(streamed).caches)
    assert info.caches == model_memory(whole).caches
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
        model: Any = meta_model(tmp_path).model
        assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
        assert torch.equal(model.lm_head.weight.source[...], head)
        before = loaded(tmp_path)
        assert (before.lm_head.weight is before.model.embed_tokens.weight) == tied


def test_weights_that_are_cut_from_stored_ones_and_joined(tmp_path: Path) -> None:
    """By operations of transformers that are no stack of experts."""
    checkpoint = save_checkpoint(tmp_path, "llama2")
    model = loaded(checkpoint)
    tensors = model.state_dict()
    layer = "model.layers.0."
    parts = [tensors.pop(f"{layer}self_attn.{name}_proj.weight") for name in "qkv"]
    down = tensors.pop(f"{layer}mlp.down_proj.weight")
    tensors |= {f"{layer}self_attn.qkv.weight": torch.cat(parts)}
    tensors |= {f"{layer}mlp.{side}.weight": half.contiguous() for side, half in zip("ab", down.chunk(2), strict=True)}
    save_file(tensors, checkpoint / "model.safetensors", {"format": "pt"})
    names = [f"self_attn.{name}_proj.weight" for name in "qkv"]
    mapping = [
        WeightConverter("self_attn.qkv.weight", names, [Chunk(dim=0)]),
        WeightConverter(["mlp.a.weight", "mlp.b.weight"], "mlp.down_proj.weight", [Concatenate(dim=0)]),
    ]
    origins = find_origins(model, mapping, stored(checkpoint))
    assert origins.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        weight = Weight(name, torch.float32, origins[name], checkpoint)
        assert weight.shape == tensor.shape
        assert torch.equal(weight[...], tensor)
        assert torch.equal(weight[1:3], tensor[1:3])


def test_a_placeholder_is_never_written(tmp_path: Path) -> None:
    model, weights = meta_model(save_checkpoint(tmp_path, "llama3"))
    name = "model.lm_head.weight"
    value = ir.Value(name=name, const_value=TorchTensor(model.get_parameter("lm_head.weight"), name))
    graph = ir.Model(ir.Graph([], [], nodes=[], initializers=[value]), ir_version=10)
    bind(graph, weights, PREFIX)
    assert isinstance(value.const_value, WeightTensor)
    value.const_value = TorchTensor(model.get_parameter("lm_head.weight"), name)
    del weights["lm_head.weight"]
    with pytest.raises(UnsupportedModelError, match=r"a weight model\.lm_head\.weight that is none of the model's"):
        bind(graph, weights, PREFIX)


def test_matrices_take_no_memory(tmp_path: Path) -> None:
    model, weights = meta_model(save_checkpoint(tmp_path, "mixtral"))
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    assert matrices
    assert all(parameter.untyped_storage().nbytes() == parameter.itemsize for parameter in matrices)
    assert len({parameter.data_ptr() for parameter in matrices}) == len(matrices)
    assert all(torch.equal(p, weights[name][...]) for name, p in model.named_parameters() if p.dim() == 1)


@pytest.mark.quick("llama3.2")
@pytest.mark.parametrize("family", ["llama3.2", "mixtral"])
def test_parts_and_pieces_make_no_difference(family: str, tmp_path: Path, small_parts: None) -> None:
    """A graph that is written in parts, then compared in pieces with its products in slices."""
    checkpoint = save_checkpoint(tmp_path / "hf", family)
    make_onnx(checkpoint, tmp_path / "onnx", dtype="float16")  # Verified.
    model = meta_model(checkpoint, "float16").model
    info = GraphInfo(vocab_size=320, dtype="float16", caches=model_memory(model).caches)
    right = reference_logits(model, 320, POSITIONS)
    assert compare(tmp_path / "onnx" / GRAPH_NAME, info, [right]) < 1e-4


def test_a_file_that_becomes_shorter(tmp_path: Path) -> None:
    weights = meta_model(save_checkpoint(tmp_path, "llama3")).weights
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(CheckpointError, match="became shorter while it was read"):
        weights["lm_head.weight"][...]
