"""DFlash and DSpark heads that cannot be read, or do not fit: one line that names it, and nothing written."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specrun.engine_dir.config import open_engine
from specrun.errors import EngineDirError
from tests.helpers.command_errors import build, error_line, says
from tests.helpers.families import VOCAB
from tests.helpers.heads.decoding import open_pair
from tests.helpers.heads.dflash import DIALECTS, MARKOV, block_tensors, save_block_head
from tests.helpers.heads.errors import head_error, own_error
from tests.helpers.heads.made import Tensors

Change = Callable[[Tensors], object]


def nested(**changes: Any) -> dict[str, Any]:
    """Changes of z-lab's nested fields."""
    fields = {**DIALECTS["z-lab"].config["dflash_config"], **changes}
    return {"dflash_config": {name: value for name, value in fields.items() if value is not None}}


CONFIGS: list[tuple[str, dict[str, Any], list[str]]] = [
    ("z-lab", {"architectures": ["DFlash2DraftModel"]}, ["architectures 'DFlash2DraftModel'", "Qwen3DSparkModel"]),
    ("z-lab", {"architectures": ["Qwen3MoEDSparkModel"]}, ["architectures 'Qwen3MoEDSparkModel'"]),
    ("z-lab", {"model_type": "gemma4"}, ["model_type 'gemma4'", "llama or qwen3"]),
    ("z-lab", {"quantization_config": {"quant_method": "fp8"}}, ["quantization_config"]),
    ("z-lab", {"layer_types": ["full_attention", "sliding_attention"]}, ["layer_types 'sliding_attention'"]),
    ("z-lab", {"is_causal": True}, ["is_causal True"]),
    ("z-lab", {"n_routed_experts": 64}, ["n_routed_experts 64"]),
    ("z-lab", nested(use_swa=True, swa_window_size=64), ["use_swa True"]),
    ("z-lab", nested(causal=True), ["causal True"]),
    ("z-lab", nested(attention_sink_bias=True), ["attention_sink_bias True"]),
    ("z-lab", nested(attention_mode="mla"), ["attention_mode 'mla'"]),
    ("z-lab", nested(projector_type="domino"), ["projector_type 'domino'", "dflash and dspark"]),
    ("z-lab", nested(selector_rank=256), ["dflash_config.selector_rank"]),
    ("z-lab", nested(mask_token_id=None), ["mask_token_id None"]),
    ("z-lab", nested(mask_token_id=VOCAB), [f"mask_token_id {VOCAB}", "below"]),
    ("z-lab", nested(target_layer_ids=None), ["target_layer_ids None"]),
    ("z-lab", nested(target_layer_ids=[0, 4]), ["layer 5", "4 layers"]),
    ("z-lab", nested(target_layer_ids=[0, 1, 2]), ["fc.weight", "64 x 128", "64 x 192"]),
    ("z-lab", {"dflash_config": "yes"}, ["dflash_config: expected an object"]),
    ("z-lab", {"block_size": None}, ["block_size None"]),
    ("z-lab", {"block_size": 1}, ["block_size 1", "no place"]),
    ("deepspec", {"markov_head_type": "rnn"}, ["markov_head_type 'rnn'"]),
    ("deepspec", {"markov_rank": "much"}, ["markov_rank 'much'"]),
    ("deepspec", {"enable_confidence_head": "yes"}, ["enable_confidence_head 'yes'"]),
    ("speculators", {"aux_hidden_state_layer_ids": None}, ["aux_hidden_state_layer_ids None"]),
]


@pytest.mark.parametrize(("dialect", "changes", "said"), CONFIGS, ids=[one[2][0] for one in CONFIGS])
def test_a_configuration_that_is_not_read(
    target: Path, tmp_path: Path, dialect: str, changes: dict[str, Any], said: list[str]
) -> None:
    head = save_block_head(tmp_path / "head", dialect, **changes)
    says(head_error(target, head, tmp_path / "out"), head, *said)


def narrow(tensors: Tensors) -> None:
    tensors[MARKOV[1]] = torch.zeros(VOCAB, 4)


OWN: list[tuple[str, Change, dict[str, Any], list[str]]] = [
    ("z-lab", lambda t: t.pop("layers.1.self_attn.k_norm.weight"), {}, ["layers.1.self_attn.k_norm.weight is missing"]),
    ("z-lab", lambda t: t.update({MARKOV[0]: torch.zeros(4, 4)}), {}, ["markov_w1.weight is not part"]),
    ("deepspec", lambda t: t.pop(MARKOV[0]), {}, ["markov_w1.weight is missing"]),
    ("deepspec", narrow, {}, ["markov_w2.weight is [320, 4]", "[320, 8]"]),
    ("deepspec", lambda t: t.pop("confidence_head.proj.bias"), {}, ["confidence_head.proj.bias is missing"]),
    ("deepspec", lambda t: None, {"confidence_head_with_markov": False}, ["confidence_head.proj.weight is [1, 72]"]),
    ("z-lab", lambda t: None, {"vocab_size": 400}, ["vocab_size 400", "320 logits", "another target"]),
]


@pytest.mark.parametrize(("dialect", "change", "changes", "said"), OWN, ids=[one[3][0] for one in OWN])
def test_tensors_of_the_head_alone(
    target: Path, tmp_path: Path, dialect: str, change: Change, changes: dict[str, Any], said: list[str]
) -> None:
    tensors = dict(block_tensors(dialect))
    change(tensors)
    head = save_block_head(tmp_path / "head", dialect, tensors, **changes)
    says(own_error(target, head, tmp_path / "out"), head, *said)


def test_a_head_is_no_model(tmp_path: Path) -> None:
    head = save_block_head(tmp_path / "head", "deepspec")
    says(error_line(build("convert", "--model_dir", head, "--output_dir", tmp_path / "out")), "draft head", "--head_of")


def test_a_markov_head_that_was_altered(dspark: Path, tmp_path: Path) -> None:
    for name in ("target", "head"):
        shutil.copytree(dspark / name, tmp_path / name)
    path = tmp_path / "head" / "markov_w2.npy"
    right = np.load(path)
    np.save(path, right.astype(np.float64))
    with pytest.raises(EngineDirError, match=r"markov_w2\.npy: .* bytes, expected"):
        open_engine(tmp_path / "head")
    path.unlink()
    with pytest.raises(EngineDirError, match=r"markov_w2\.npy: missing"):
        open_pair(tmp_path, head=True)
