"""Small random models of families that have no configuration in ``families``: the family's own, with small sizes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig

from tests.helpers.families import spread_weights

LAYERS = 2
SIZES: dict[str, Any] = {
    **{"vocab_size": 320, "vocab_size_per_layer_input": 320, "max_position_embeddings": 128, "n_positions": 128},
    **{"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "sliding_window": 16},
    **{"intermediate_size": 96, "n_inner": 96, "hidden_size": 64, "n_embd": 64, "head_dim": 16},
    **dict.fromkeys(("num_hidden_layers", "n_layer"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head"), 4),
}
"""Where a family has a setting of the name."""
SPECIAL: dict[str, dict[str, Any]] = {"nemotron": {"head_dim": 16, "num_key_value_heads": 2}}


def small_of(model_type: str) -> PreTrainedConfig:
    """A configuration with small sizes, and the family's own settings elsewhere."""
    special = SPECIAL.get(model_type, {})
    default = CONFIG_MAPPING[model_type](**special)
    config_class: Callable[..., PreTrainedConfig] = type(default)
    known = default.to_dict()
    given = {name: value for name, value in SIZES.items() if known.get(name) is not None}
    if known.get("num_key_value_heads") is not None:
        given["num_key_value_heads"] = 4 if known["num_key_value_heads"] == known.get("num_attention_heads") else 2
    if isinstance(known.get("layer_types"), list):
        kinds = list(dict.fromkeys(known["layer_types"]))[:LAYERS]
        given["layer_types"] = (kinds + [kinds[-1]] * LAYERS)[:LAYERS]
    return config_class(**(special | given))


def save_small(model_type: str, directory: Path) -> Path:
    """A checkpoint with random weights whose logits differ clearly."""
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(small_of(model_type), dtype=torch.float32)
    spread_weights(model)
    model.save_pretrained(directory)
    return directory
