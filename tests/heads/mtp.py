"""Small random targets with a multi-token prediction layer, named and laid out as the published ones are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers.modeling_layers import MtpModel

from tests.families import SIZES, save_tokenizer, spread_weights
from tests.heads.made import Tensors

LAYERS = 2
"""Of a target without it."""
_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
_SIZES: dict[str, Any] = {**SIZES, **_EXPERTS, "num_hidden_layers": LAYERS + 1}
TARGETS = {
    # GLM-4.5.
    "glm4_moe": lambda: transformers.Glm4MoeConfig(**_SIZES, head_dim=16, use_qk_norm=True, attention_bias=True),
    # Multi-head latent attention.
    "deepseek_v3": lambda: transformers.DeepseekV3Config(
        **{**_SIZES, "num_key_value_heads": SIZES["num_attention_heads"]},
        kv_lora_rank=32,
        q_lora_rank=24,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
    ),
}


def save_mtp_target(directory: Path, family: str) -> Path:
    """Its weight files hold one layer more than it has, with what makes an MTP layer of it."""
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(TARGETS[family](), dtype=torch.float32)
    spread_weights(model)
    for name, buffer in model.named_buffers():
        if "bias" in name:
            buffer.normal_(std=0.1)
    model.save_pretrained(directory)
    save_tokenizer(directory)
    path = directory / "model.safetensors"
    save_file({**load_file(path), **_own_tensors(model)}, path, {"format": "pt"})
    change_config(directory, num_hidden_layers=LAYERS)
    return directory


def _own_tensors(model: Any) -> Tensors:
    """What an MTP layer has beside a layer's tensors. The last two are copies that nobody reads, and wrong here."""
    width, prefix = model.config.hidden_size, f"model.layers.{LAYERS}."
    norms = {name: 1 + 0.3 * torch.randn(width) for name in ("enorm", "hnorm", "shared_head.norm")}
    matrices = {
        "eh_proj": torch.randn(width, 2 * width) / width**0.5,
        "embed_tokens": torch.randn(model.config.vocab_size, width),
        "shared_head.head": torch.randn(model.config.vocab_size, width),
    }
    return {f"{prefix}{name}.weight": tensor for name, tensor in {**norms, **matrices}.items()}


def change_config(directory: Path, **changes: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def load_reference(directory: Path) -> tuple[Any, Any]:
    """transformers' model and its own MTP model, in eager attention."""
    model = AutoModelForCausalLM.from_pretrained(directory, attn_implementation="eager").eval()
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{LAYERS}\."]  # Its patterns are of large models.
    return model, MtpModel.from_pretrained(model).eval()
