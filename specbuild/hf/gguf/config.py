"""The metadata of a GGUF file as a transformers configuration.

The keys: docs/gguf.md of ggml, and gguf-py/gguf/constants.py. What a file does not state is what llama.cpp takes
(src/llama-model.cpp).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from specbuild.weights.gguf_file import GgufFile
from specrun.errors import CheckpointError, UnsupportedModelError

_GEMMA3_LOCAL_THETA, _GEMMA3_PATTERN = 10_000.0, 6
_GEMMA_27B_WIDTHS = {"gemma2": 4608, "gemma3": 5376}
"""Widths of the 27B models, which divide queries by the root of width / heads, not of a head's size."""
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""RoPE parameters of Llama 3.1 and 3.2. A file has the factors that follow from them, not the parameters."""
_CLOSE = 1e-3

Numbers = Callable[[str], np.ndarray[Any, np.dtype[np.float32]] | None]
"""Reads a vector of the file by its name; None: there is none."""


class _Keys:
    """The metadata of one architecture."""

    def __init__(self, file: GgufFile) -> None:
        self.file, self.prefix = file, file.architecture

    def get(self, key: str, kind: type[int] | type[float], default: Any = None) -> Any:
        """A number. Raises CheckpointError where it is none, or there is neither one nor a default."""
        name = f"{self.prefix}.{key}"
        value = self.file.metadata.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int if kind is int else (int, float)):
            raise CheckpointError(f"{self.file.path}: {name} is {value!r}, expected a number; download it again")
        return value

    def integer(self, key: str, default: int | None = None) -> int:
        return int(self.get(key, int, default))

    def number(self, key: str, default: float | None = None) -> float:
        return float(self.get(key, float, default))

    def has(self, key: str) -> bool:
        return f"{self.prefix}.{key}" in self.file.metadata


def hf_config(file: GgufFile, numbers: Numbers) -> dict[str, Any]:
    """config.json of the model, without its dtype. Raises CheckpointError, UnsupportedModelError."""
    if file.architecture not in ARCHITECTURES:
        raise UnsupportedModelError(
            f"{file.path}: architecture {file.architecture!r}; specbuild reads GGUF files of "
            f"{', '.join(ARCHITECTURES)}; give the safetensors checkpoint that it was made from"
        )
    keys = _Keys(file)
    if keys.has("expert_count") and keys.integer("expert_count"):
        raise UnsupportedModelError(
            f"{file.path}: a mixture of experts, which specbuild does not read from GGUF; give the safetensors "
            "checkpoint that it was made from"
        )
    heads, width = keys.integer("attention.head_count"), keys.integer("embedding_length")
    if heads < 1 or width < 1 or "token_embd.weight" not in file.tensors:
        raise CheckpointError(f"{file.path}: no model: {heads} heads of width {width}; download it again")
    config = {
        "hidden_size": width,
        "num_hidden_layers": keys.integer("block_count"),
        "intermediate_size": keys.integer("feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": keys.integer("attention.head_count_kv", heads),
        "head_dim": keys.integer("attention.key_length", width // heads),
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": keys.integer("context_length"),
        "rope_parameters": _rope(keys, numbers),
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        config[f"{name}_token_id"] = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
    model_type, architecture, of_family = ARCHITECTURES[file.architecture]
    family_config = of_family(keys, config) if of_family else {}
    return config | {"model_type": model_type, "architectures": [architecture]} | family_config


def _rope(keys: _Keys, numbers: Numbers) -> dict[str, Any]:
    theta = keys.number("rope.freq_base", 10_000.0)
    long, short = numbers("rope_factors_long.weight"), numbers("rope_factors_short.weight")
    if long is not None and short is not None:
        trained = keys.integer("rope.scaling.original_context_length")
        return {
            "rope_type": "longrope",
            "rope_theta": theta,
            "long_factor": long.tolist(),
            "short_factor": short.tolist(),
            "original_max_position_embeddings": trained,
            "factor": keys.integer("context_length") / trained,
        }
    if (factors := numbers("rope_freqs.weight")) is not None:
        return _llama3_rope(keys, theta, factors)
    kind = keys.file.metadata.get(f"{keys.prefix}.rope.scaling.type", "none")
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind not in ("linear", "yarn"):
        raise UnsupportedModelError(f"{keys.file.path}: rope.scaling.type {kind!r} is not read")
    scaled: dict[str, Any] = {"rope_type": kind, "rope_theta": theta, "factor": keys.number("rope.scaling.factor")}
    if kind == "yarn":
        scaled["original_max_position_embeddings"] = keys.integer("rope.scaling.original_context_length")
    return scaled


def _llama3_rope(keys: _Keys, theta: float, factors: np.ndarray[Any, np.dtype[np.float32]]) -> dict[str, Any]:
    """Raises UnsupportedModelError where the factors are not Llama 3's."""
    largest = float(factors.max())
    rope = {"rope_type": "llama3", "rope_theta": theta, "factor": largest, **_LLAMA3_ROPE}
    low, high, trained = (float(number) for number in _LLAMA3_ROPE.values())
    wavelengths = 2 * math.pi * theta ** (np.arange(len(factors)) / len(factors))
    smooth = np.clip((trained / wavelengths - low) / (high - low), 0, 1)
    if np.abs(factors - 1 / ((1 - smooth) / largest + smooth)).max() > _CLOSE * largest:
        raise UnsupportedModelError(
            f"{keys.file.path}: rope_freqs.weight has other factors than Llama 3.1 and 3.2 have; give the safetensors "
            "checkpoint that it was made from"
        )
    return rope


def _llama(keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    return {"attention_bias": "blk.0.attn_q.bias" in keys.file.tensors}


def _phi3(keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    head = config["hidden_size"] // config["num_attention_heads"]
    rope = {"partial_rotary_factor": keys.integer("rope.dimension_count", head) / head}
    window = keys.integer("attention.sliding_window", 0) or None
    return {
        "rope_parameters": config["rope_parameters"] | rope,
        "original_max_position_embeddings": config["rope_parameters"].get(
            "original_max_position_embeddings", config["max_position_embeddings"]
        ),
        "sliding_window": window,
        "pad_token_id": config["pad_token_id"] or config["eos_token_id"],
    }


def _gemma(keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    width, heads = config["hidden_size"], config["num_attention_heads"]
    is_largest = width == _GEMMA_27B_WIDTHS[keys.prefix]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": width // heads if is_largest else config["head_dim"],
        "sliding_window": keys.integer("attention.sliding_window"),
    }


def _gemma2(keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    return _gemma(keys, config) | {
        "attn_logit_softcapping": keys.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": keys.number("final_logit_softcapping", 30.0),
    }


def _gemma3(keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    layers = config["num_hidden_layers"]
    kinds = ["full_attention" if (layer + 1) % _GEMMA3_PATTERN == 0 else "sliding_attention" for layer in range(layers)]
    local = {"rope_type": "default", "rope_theta": keys.number("rope.freq_base_swa", _GEMMA3_LOCAL_THETA)}
    return _gemma(keys, config) | {
        "layer_types": kinds,
        "rope_parameters": {"full_attention": config["rope_parameters"], "sliding_attention": local},
    }


_Fields = Callable[[_Keys, dict[str, Any]], dict[str, Any]]
ARCHITECTURES: dict[str, tuple[str, str, _Fields | None]] = {
    "llama": ("llama", "LlamaForCausalLM", _llama),  # Mistral's and SmolLM's files say so too.
    "qwen2": ("qwen2", "Qwen2ForCausalLM", None),
    "qwen3": ("qwen3", "Qwen3ForCausalLM", None),
    "gemma2": ("gemma2", "Gemma2ForCausalLM", _gemma2),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM", _gemma3),
    "phi3": ("phi3", "Phi3ForCausalLM", _phi3),
}
"""``model_type``, class, and a function of further fields of the configuration, by ``general.architecture``."""
