"""Writes the checkpoint of a GGUF file.

It has config.json, the tokenizer, and in safetensors what is not quantized. Quantized tensors stay in the file, to
which a link leads, under the names that transformers gives them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from specbuild.hf.gguf.config import hf_config
from specbuild.hf.gguf.tokenizer import end_token_ids, save_tokenizer_files
from specbuild.quantized_formats.unpack.gguf import SUFFIX
from specbuild.weights.gguf_file import DENSE, GgufFile, GgufTensor
from specbuild.weights.lazy_tensors import StoredTensor
from specbuild.weights.safetensors_files import GGUF_INDEX_NAME, GGUF_NAME, SINGLE_NAME, Entry
from specrun.errors import CheckpointError

_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
"""Modules of a layer, by llama.cpp's names."""
_GEMMA = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_OF_ARCHITECTURE = {"gemma2": _GEMMA, "gemma3": _GEMMA, "phi3": {"ffn_up": "mlp.gate_up_proj"}}
_OUTSIDE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_TABLE = "model.embed_tokens"
_ROPE = re.compile(r"rope_(freqs|factors_long|factors_short)\.weight")
"""Tensors that the configuration tells of."""
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def write_checkpoint(file: GgufFile, work: Path) -> None:
    """Write it into ``work``. Raises CheckpointError, UnsupportedModelError."""

    def numbers(name: str) -> np.ndarray[Any, np.dtype[np.float32]] | None:
        tensor = file.tensors.get(name)
        return None if tensor is None or tensor.type not in DENSE else _read(file, tensor).float().numpy()

    config = hf_config(file, numbers)
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    dense: dict[str, torch.Tensor] = {}
    index, types, paired = {}, {}, {}
    for tensor in file.tensors.values():
        if _ROPE.fullmatch(tensor.name):
            continue
        module, part, weight_name = _name(file, tensor)
        pairs = heads.get(weight_name, 0) if file.architecture == "llama" else 0
        if tensor.type not in DENSE:
            index[f"{module}.{SUFFIX}"], types[module] = tensor.name, tensor.type
            if pairs:
                paired[module] = pairs
            continue
        values = _read(file, tensor)
        if weight_name.endswith("norm") and file.architecture.startswith("gemma"):
            values = values.float() - 1  # llama.cpp keeps what a norm multiplies by.
        if pairs:
            values = values.unflatten(0, (pairs, -1, 2)).transpose(1, 2).reshape(values.shape)
        dense[f"{module}.{part}"] = values
    dtype = _dtype(dense)
    save_file({name: values.to(_DTYPES[dtype]).contiguous() for name, values in dense.items()}, work / SINGLE_NAME)
    config |= {"dtype": dtype}
    if index:
        method = {"quant_method": "gguf", "types": types, "heads": paired, "tables": [_TABLE]}
        config |= {"quantization_config": method}
        (work / GGUF_INDEX_NAME).write_text(json.dumps({"weight_map": index}))
    (work / GGUF_NAME).symlink_to(file.path)
    (work / "config.json").write_text(json.dumps(config, indent=2))
    ends = end_token_ids(file)
    (work / "generation_config.json").write_text(
        json.dumps({"bos_token_id": config["bos_token_id"], "eos_token_id": ends or None})
    )
    save_tokenizer_files(file, work)


def _read(file: GgufFile, tensor: GgufTensor) -> torch.Tensor:
    entry = Entry(file.path, tensor.offset, tensor.shape, tensor.type)
    return StoredTensor(entry).read((slice(None),) * len(tensor.shape), StoredTensor(entry).dtype)


def _name(file: GgufFile, tensor: GgufTensor) -> tuple[str, str, str]:
    """The module in transformers, ``weight`` or ``bias``, and llama.cpp's name of the module."""
    if (match := _LAYER.fullmatch(tensor.name)) is not None:
        layer, weight_name, part = match.groups()
        known = _MODULES | _OF_ARCHITECTURE.get(file.architecture, {})
        if weight_name in known:
            return f"model.layers.{int(layer)}.{known[weight_name]}", part, weight_name
    weight_name, _, part = tensor.name.rpartition(".")
    if weight_name in _OUTSIDE and part in ("weight", "bias"):
        return _OUTSIDE[weight_name], part, weight_name
    raise CheckpointError(
        f"{file.path}: tensor {tensor.name} is none of a {file.architecture} that specbuild knows; give the "
        "safetensors checkpoint that the file was made from"
    )


def _dtype(dense: dict[str, torch.Tensor]) -> str:
    """The shortest dtype that holds all numbers that are not quantized: norms are often float32 of fewer bits."""
    for name in ("bfloat16", "float16"):
        kind = _DTYPES[name]
        if all(torch.equal(values.to(kind).to(values.dtype), values) for values in dense.values()):
            return name
    return "float32"
