"""``convert --verify`` sees what is wrong with a graph: numbers that are none, windows, rotary switches."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx as onnx_format
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedConfig

from specbuild.artifacts.onnx_checkpoint import open_checkpoint
from specbuild.convert.verify import compare
from specbuild.export.exporter import export_onnx
from specbuild.export.model_memory import model_memory
from specbuild.export.reference import far_reference, reference_logits
from specbuild.export.rope import pin_rope
from specbuild.graph.ops import save
from specbuild.graph.tidy import tidy
from specrun.engine_dir.config import GRAPH_NAME, GraphInfo
from specrun.errors import CheckpointError, SpecError, VerificationError
from tests.helpers.engines import make_onnx
from tests.helpers.families import FAMILIES, LONG_ROPE, POSITIONS, SIZES, save_checkpoint


def altered(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> Path:
    """A checkpoint whose weights were changed."""
    weights = save_checkpoint(directory, "llama3") / "model.safetensors"
    tensors = load_file(weights)
    change(tensors)
    save_file(tensors, weights, {"format": "pt"})
    return directory


@pytest.mark.quick("{}", "nan")
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("options", [{}, {"verify": False}, {"dtype": "bfloat16"}], ids=str)
def test_a_weight_that_is_not_finite_is_named(tmp_path: Path, value: float, options: dict[str, Any]) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = value

    checkpoint = altered(tmp_path / "hf", spoil)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight are not finite"):
        make_onnx(checkpoint, tmp_path / "out" / "onnx", **options)
    assert list((tmp_path / "out").iterdir()) == []


def test_weights_that_are_all_not_numbers_are_refused(tmp_path: Path) -> None:
    checkpoint = altered(tmp_path / "hf", lambda tensors: [t.fill_(torch.nan) for t in tensors.values()])
    with pytest.raises(CheckpointError, match="are not finite"):
        make_onnx(checkpoint, tmp_path / "onnx")


def test_a_model_that_overflows_is_refused(tmp_path: Path) -> None:
    """Its weights are finite; its logits are not."""

    def enlarge(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"].fill_(3e38)
        tensors["lm_head.weight"].fill_(3e38)

    checkpoint = altered(tmp_path / "hf", enlarge)
    with pytest.raises(VerificationError, match="the model's own logits are not finite"):
        make_onnx(checkpoint, tmp_path / "onnx")


def load(config: PreTrainedConfig) -> Any:
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.08 + (1 if parameter.dim() == 1 else 0))
    return model.eval()


def exported(model: Any, directory: Path, max_seq_len: int = POSITIONS) -> tuple[Path, GraphInfo]:
    info = GraphInfo(vocab_size=model.config.vocab_size, dtype="float32", caches=model_memory(model).caches)
    directory.mkdir()
    graph = export_onnx(model, model_memory(model), max_seq_len)
    tidy(graph)
    save(graph, directory / "model.onnx", lambda *_: None)
    return directory / "model.onnx", info


def test_a_graph_whose_logits_are_not_numbers_is_refused(hf: Path, onnx: Path, tmp_path: Path) -> None:
    """As where the exporter folded a constant wrongly: the difference to NaN is no difference."""
    model = AutoModelForCausalLM.from_pretrained(hf / "target", attn_implementation="eager").eval()
    reference = reference_logits(model, model.config.vocab_size, POSITIONS)
    info = open_checkpoint(onnx / "target").graph
    assert compare(onnx / "target" / GRAPH_NAME, info, [reference]) < 1e-4
    graph = onnx_format.load(onnx / "target" / GRAPH_NAME)
    (norm,) = [tensor for tensor in graph.graph.initializer if "model.norm.weight" in tensor.name]
    spoilt = onnx_format.numpy_helper.to_array(norm).copy()
    spoilt[0] = np.nan
    norm.CopyFrom(onnx_format.numpy_helper.from_array(spoilt, norm.name))
    onnx_format.save(graph, tmp_path / GRAPH_NAME)
    with pytest.raises(VerificationError, match="the exported graph's logits are not finite"):
        compare(tmp_path / GRAPH_NAME, info, [reference])


WINDOW = 60
"""Longer than the rows that are compared from their beginning."""
WINDOWED: dict[str, Callable[[int], PreTrainedConfig]] = {
    "mistral": lambda window: transformers.MistralConfig(**SIZES, sliding_window=window),
    "gemma2": lambda window: transformers.Gemma2Config(
        **SIZES, head_dim=32, sliding_window=window, query_pre_attn_scalar=24
    ),
}


@pytest.fixture(scope="module")
def windowed_graphs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], tuple[Path, GraphInfo]]:
    """The graph of a family's model with a window of so many positions, exported once."""

    @functools.cache
    def graph(family: str, window: int) -> tuple[Path, GraphInfo]:
        return exported(load(WINDOWED[family](window)), tmp_path_factory.mktemp(family) / "onnx")

    return graph


@pytest.mark.quick("right-mistral", "shorter-mistral", "longer-mistral")
@pytest.mark.parametrize("family", WINDOWED)
@pytest.mark.parametrize("wrong", [0, -1, 1, None], ids=["right", "shorter", "longer", "none"])
def test_a_window_that_is_wrong_by_one_position_is_seen(
    windowed_graphs: Callable[[str, int], tuple[Path, GraphInfo]], family: str, wrong: int | None
) -> None:
    """The graph's window is that much longer than the model's, or there is none."""
    window = WINDOW - (wrong or 0)
    path, info = windowed_graphs(family, WINDOW if wrong is not None else 4096)
    right = load(WINDOWED[family](window))
    near = reference_logits(right, right.config.vocab_size, POSITIONS)
    far = far_reference(right, info, POSITIONS)
    assert far and far.start > window
    assert compare(path, info, [near]) < 1e-4, "texts shorter than the window see nothing"
    if wrong == 0:
        assert compare(path, info, [near, far]) < 1e-4
        return
    with pytest.raises(VerificationError, match=f"disagree behind {far.start} tokens"):
        compare(path, info, [near, far])


@pytest.mark.parametrize("wrong", [False, True])
def test_a_wrong_side_of_a_rotary_switch_is_seen(tmp_path: Path, wrong: bool) -> None:
    """The short frequencies where the model has the long ones; its own are those before they are pinned."""
    config = transformers.Phi3Config(**SIZES, original_max_position_embeddings=32, rope_parameters=LONG_ROPE)
    model, original = load(config), 32
    info = GraphInfo(vocab_size=config.vocab_size, dtype="float32", caches=model_memory(model).caches)
    far = far_reference(model, info, POSITIONS)
    assert far and far.start > original
    pin_rope(model, original if wrong else POSITIONS)
    near = reference_logits(model, config.vocab_size, POSITIONS)
    path, _ = exported(model, tmp_path / "onnx")
    assert compare(path, info, [near]) < 1e-4
    if wrong:
        with pytest.raises(VerificationError, match="disagree behind"):
            compare(path, info, [near, far])
    else:
        assert compare(path, info, [near, far]) < 1e-4


def test_no_long_text_where_the_model_has_no_such_length() -> None:
    for family, length in (("llama3", POSITIONS), ("mistral", 12), ("phi3-longrope", 32)):
        model = load(FAMILIES[family]())
        info = GraphInfo(vocab_size=320, dtype="float32", caches=model_memory(model).caches)
        assert far_reference(model, info, length) is None


def test_eos_token_ids_that_are_none(tmp_path: Path) -> None:
    for number, ids in enumerate(("x", -1, [0, "1"], 1.5)):
        checkpoint = save_checkpoint(tmp_path / str(number), "llama3")
        for name in ("config.json", "generation_config.json"):
            if (path := checkpoint / name).is_file():
                path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": ids}))
        with pytest.raises(SpecError, match="eos_token_id"):
            make_onnx(checkpoint, tmp_path / f"onnx{number}", verify=False)


@pytest.mark.slow("export/test_families.py, deepseek_v2")
def test_multi_head_latent_attention_converts(tmp_path: Path) -> None:
    """DeepSeek V3's cache is one key and one value tensor a layer, of a head that all heads share."""
    config = transformers.DeepseekV3Config(
        **{**SIZES, "num_key_value_heads": 4},
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        kv_lora_rank=16,
        q_lora_rank=24,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
    )
    load(config).save_pretrained(tmp_path / "hf")
    checkpoint = open_checkpoint(make_onnx(tmp_path / "hf", tmp_path / "onnx"))
    assert checkpoint.max_logit_difference is not None and checkpoint.max_logit_difference < 1e-4
