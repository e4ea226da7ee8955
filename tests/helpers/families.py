"""Small random checkpoints of every family, saved and loaded like real ones."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.onnx._internal.exporter._registration import ONNXRegistry
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedTokenizerFast

from scripts.byte_level import byte_level

# The exporter looks its operators up anew for every model; they are the same for all models of a process.
ONNXRegistry.from_torchlib = staticmethod(functools.cache(ONNXRegistry.from_torchlib))  # type: ignore[method-assign]

VOCAB = 320
POSITIONS = 128
EOS = 0

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": POSITIONS,
    "bos_token_id": EOS,
    "eos_token_id": EOS,
    "pad_token_id": EOS,
}
EVERY_HEAD = {**SIZES, "num_key_value_heads": 4}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [1.0 + i / 2 for i in range(8)],
    "original_max_position_embeddings": 32,
}

FAMILIES: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama2": lambda: transformers.LlamaConfig(**EVERY_HEAD),
    "llama3": lambda: transformers.LlamaConfig(**{**SIZES, "rope_theta": 500000.0}),
    "llama3.2": lambda: transformers.LlamaConfig(**SIZES, tie_word_embeddings=True, rope_parameters=LLAMA3_ROPE),
    "tinyllama": lambda: transformers.LlamaConfig(
        **{**SIZES, "num_attention_heads": 8, "num_key_value_heads": 1}, head_dim=16
    ),
    "mistral": lambda: transformers.MistralConfig(**SIZES, sliding_window=6),
    "mixtral": lambda: transformers.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "gemma": lambda: transformers.GemmaConfig(**SIZES, head_dim=32),
    "gemma2": lambda: transformers.Gemma2Config(**SIZES, head_dim=32, sliding_window=6, query_pre_attn_scalar=24),
    # Every sixth layer sees the whole text, with a rotary embedding of its own; here every third.
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **{**SIZES, "num_hidden_layers": 3},
        head_dim=32,
        sliding_window=6,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    ),
    "phi2": lambda: transformers.PhiConfig(**{**EVERY_HEAD, "partial_rotary_factor": 0.5}),
    "phi3": lambda: transformers.Phi3Config(**SIZES, sliding_window=None),
    "phi3-longrope": lambda: transformers.Phi3Config(
        **SIZES, original_max_position_embeddings=32, rope_parameters=LONG_ROPE
    ),
    "qwen2": lambda: transformers.Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": lambda: transformers.Qwen3Config(**SIZES, head_dim=32),
    "olmo2": lambda: transformers.Olmo2Config(**SIZES),  # RoPE in float32, cast back.
    "stablelm": lambda: transformers.StableLmConfig(**SIZES),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, n_positions=POSITIONS, bos_token_id=EOS, eos_token_id=EOS
    ),
    "opt": lambda: transformers.OPTConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        word_embed_proj_dim=64,
        ffn_dim=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=POSITIONS,
        bos_token_id=EOS,
        eos_token_id=EOS,
        pad_token_id=1,
    ),
    "gpt_neox": lambda: transformers.GPTNeoXConfig(
        **{key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
    ),
    # Multi-head latent attention, experts, and a rotary embedding in complex numbers.
    "deepseek_v2": lambda: transformers.DeepseekV2Config(
        **EVERY_HEAD,
        kv_lora_rank=32,
        q_lora_rank=None,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        first_k_dense_replace=1,
        topk_method="greedy",
    ),
    # One layer has complex numbers in chunks, the other no rotary embedding and queries that grow with the text.
    "llama4": lambda: transformers.Llama4TextConfig(
        **SIZES,
        head_dim=16,
        intermediate_size_mlp=96,
        num_local_experts=4,
        num_experts_per_tok=1,
        attention_chunk_size=16,
        no_rope_layers=[1, 0],
        floor_scale=4,
        attn_scale=0.5,
    ),
}
HYBRID: dict[str, Any] = {**SIZES, "num_hidden_layers": 4, "head_dim": 16, "max_position_embeddings": 512}
LINEAR = ["linear_attention", "full_attention"] * 2
DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": LINEAR,
}
"""Gated delta nets, whose keys are shared by two heads each."""
TWO_LAYERS: dict[str, Any] = {**HYBRID, "num_hidden_layers": 2}
"""Where another family has several layers of the same kind."""
MAMBA: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 2}
RECURRENT: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3_5": lambda: transformers.Qwen3_5TextConfig(**HYBRID, **DELTA),
    "qwen3_next": lambda: transformers.Qwen3NextConfig(
        **TWO_LAYERS,
        **{**DELTA, "layer_types": LINEAR[:2]},
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
    ),
    "olmo_hybrid": lambda: transformers.OlmoHybridConfig(**TWO_LAYERS, **{**DELTA, "layer_types": LINEAR[:2]}),
    # A decay for every channel of a key, and multi-head latent attention.
    "kimi_linear": lambda: transformers.KimiLinearConfig(
        **{**TWO_LAYERS, "head_dim": None, "num_key_value_heads": 4},
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=16,
        v_head_dim=16,
        linear_head_dim=16,
        linear_num_heads=4,
        num_local_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        layer_types=LINEAR[:2],
    ),
    "bamba": lambda: transformers.BambaConfig(**TWO_LAYERS, **MAMBA, attn_layer_indices=[1]),
    "granitemoehybrid": lambda: transformers.GraniteMoeHybridConfig(
        **TWO_LAYERS, **MAMBA, layer_types=LINEAR[:2], num_local_experts=0, shared_intermediate_size=64
    ),
    # Attention and a state-space model side by side in every layer.
    "falcon_h1": lambda: transformers.FalconH1Config(**TWO_LAYERS, **MAMBA, mamba_d_ssm=128),
    # Layers of one kind each, some of which keep nothing.
    "nemotron_h": lambda: transformers.NemotronHConfig(
        **{**HYBRID, "hybrid_override_pattern": "M-M*"},
        mamba_num_heads=4,
        mamba_head_dim=32,
        ssm_state_size=16,
        n_groups=2,
    ),
    "lfm2": lambda: transformers.Lfm2Config(**HYBRID, layer_types=["conv", "full_attention"] * 2),
    "lfm2_moe": lambda: transformers.Lfm2MoeConfig(
        **TWO_LAYERS,
        layer_types=["conv", "full_attention"],
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        num_dense_layers=1,
    ),
}
"""Families with recurrent layers."""
OTHERS: dict[str, Callable[[], PreTrainedConfig]] = {
    # Experts with biases, kept [E, in, out], whose gate and up columns take turns; attention sinks.
    "gpt_oss": lambda: transformers.GptOssConfig(
        **SIZES, head_dim=16, num_local_experts=4, num_experts_per_tok=2, sliding_window=8
    ),
    "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
        **{**SIZES, "head_dim": 16}, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
    "qwen2_moe": lambda: transformers.Qwen2MoeConfig(
        **SIZES,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=48,
        norm_topk_prob=True,
    ),
    "granitemoe": lambda: transformers.GraniteMoeConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
}
"""Those of single tests."""

TEXT = "the quick brown fox jumps over the lazy dog, and draft tokens are checked by the target in one pass. " * 3


def save_tokenizer(directory: Path, text: str = TEXT) -> None:
    """A byte-level BPE tokenizer trained on ``text``, written as transformers writes one."""
    tokenizer = byte_level([text], VOCAB)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>", bos_token="<|endoftext|>")
    fast.chat_template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
    fast.save_pretrained(directory)


def spread_weights(model: torch.nn.Module) -> None:
    """Library defaults make nearly flat logits, norms of exactly 1 and biases of 0, which hide mistakes."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3.0)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.05)


def save_checkpoint(
    directory: Path,
    family: str,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    shards: bool = False,
    **changes: Any,
) -> Path:
    """A random checkpoint of ``family`` with a tokenizer, at a scale that makes its logits differ clearly."""
    torch.manual_seed(seed)
    config = {**FAMILIES, **RECURRENT, **OTHERS}[family]()
    for name, value in changes.items():
        setattr(config, name, value)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    spread_weights(model)
    model.to(dtype).save_pretrained(directory, max_shard_size="100KB" if shards else "5GB")
    save_tokenizer(directory)
    return directory
