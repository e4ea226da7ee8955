"""GGUF files of Hugging Face checkpoints, written with ggml's own package, by the rules of llama.cpp's converter."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file

ARCHITECTURES = {"mistral": "llama", "gemma3_text": "gemma3"}
"""By the model type, where llama.cpp has another name."""
Kind = Callable[[str], str]
"""Takes a tensor's name in the file and gives its type."""


def blocks_of(kind: str, shape: tuple[int, int], seed: int = 0) -> npt.NDArray[np.uint8]:
    """[N, bytes of a row] of random bytes whose floats are small numbers."""
    import gguf

    numbers, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    random = np.random.default_rng(seed)
    data = random.integers(0, 256, (shape[0], shape[1] // numbers, size), np.uint8)
    places = {"Q2_K": [80, 82], "Q3_K": [108], "Q6_K": [208], "Q8_K": [0]}
    pairs = ("Q4_1", "Q5_1", "Q4_K", "Q5_K")
    for place in places.get(kind, [0, 2] if kind in pairs else [0]):
        scale = random.uniform(-0.002, 0.002, data.shape[:2]).astype("<f2")
        data[..., place : place + 2] = scale[..., None].view(np.uint8)
    return data.reshape(shape[0], -1)


def dequantized(kind: str, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
    """[N, K], by ggml's package."""
    import gguf

    return np.asarray(gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind]))


def write_gguf(checkpoint: Path, file: Path, kind: Kind = lambda _: "F32") -> dict[str, npt.NDArray[np.float32]]:
    """Write the file, and return the numbers of its tensors by llama.cpp's names.

    kind: the types of matrices. Quantized ones get random blocks, not the checkpoint's numbers.
    """
    import gguf

    config = json.loads((checkpoint / "config.json").read_text())
    name = ARCHITECTURES.get(config["model_type"], config["model_type"])
    architecture = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    writer = gguf.GGUFWriter(file, name)
    _write_metadata(writer, config)
    _write_tokenizer(writer, checkpoint, config)
    numbers = {}
    for ours, tensor in load_file(checkpoint / "model.safetensors").items():
        module, _, part = ours.rpartition(".")
        theirs = f"{names.get_name(module)}.{part}"
        values = _as_llama_cpp(name, theirs, tensor.float(), config).numpy()
        own = kind(theirs) if values.ndim == 2 else "F32"
        if own in ("F32", "F16"):
            numbers[theirs] = values.astype(np.float16 if own == "F16" else np.float32).astype(np.float32)
            writer.add_tensor(theirs, values.astype(np.float16 if own == "F16" else np.float32))
            continue
        blocks = blocks_of(own, values.shape, seed=len(numbers))
        numbers[theirs] = dequantized(own, blocks)
        writer.add_tensor(theirs, blocks, raw_dtype=gguf.GGMLQuantizationType[own])
    for theirs, factors in _rope_factors(config).items():
        writer.add_tensor(theirs, factors)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return numbers


def _write_metadata(writer: Any, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if config.get("head_dim"):
        writer.add_key_length(config["head_dim"])
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    if config["model_type"] == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if rope.get("rope_type") == "longrope":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def _write_tokenizer(writer: Any, checkpoint: Path, config: dict[str, Any]) -> None:
    model = json.loads((checkpoint / "tokenizer.json").read_text())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].__getitem__)
    tokens += [f"[PAD{number}]" for number in range(len(tokens), config["vocab_size"])]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token == "<|endoftext|>" else 1 for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in model["merges"]])
    for add in (writer.add_bos_token_id, writer.add_eos_token_id, writer.add_pad_token_id):
        add(model["vocab"]["<|endoftext|>"])
    if (template := checkpoint / "chat_template.jinja").is_file():
        writer.add_chat_template(template.read_text())


def _as_llama_cpp(architecture: str, name: str, values: torch.Tensor, config: dict[str, Any]) -> torch.Tensor:
    """convert_hf_to_gguf.py: Llama's queries and keys in pairs, Gemma's norms plus one."""
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return values + 1
    if architecture == "llama" and (".attn_q." in name or ".attn_k." in name):
        heads = config["num_attention_heads" if ".attn_q." in name else "num_key_value_heads"]
        pairs: torch.Tensor = values.unflatten(0, (heads, 2, -1)).transpose(1, 2)
        return pairs.reshape(values.shape)
    return values


def _rope_factors(config: dict[str, Any]) -> dict[str, npt.NDArray[np.float32]]:
    rope = config["rope_parameters"]
    if rope.get("rope_type") == "longrope":
        return {
            f"rope_factors_{kind}.weight": np.array(rope[f"{kind}_factor"], np.float32) for kind in ("long", "short")
        }
    if rope.get("rope_type") != "llama3":
        return {}
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    size = config["head_dim"]
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](LlamaConfig(**config), torch.device("cpu"))
    plain = 1.0 / rope["rope_theta"] ** (torch.arange(0, size, 2) / size)
    return {"rope_freqs.weight": (plain / scaled).numpy().astype(np.float32)}
