"""What cannot be converted, and why: other formats, and models that remember more of a text than keys and values."""

from __future__ import annotations

import sys
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specbuild.files import read_json
from specrun.errors import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

REASONS = {
    "blt": "it reads bytes in patches that it finds itself, with a cache for each of its three models",
    "falcon_mamba": "it is a state-space model: it keeps one state instead of keys and values for every position",
    **dict.fromkeys(
        ("gemma4_assistant", "gemma4_unified_assistant"),
        "it drafts from the keys and values of its target, which no engine hands over, and has none of its own",
    ),
    "minimax": "it keeps a cache of its own kind, with states of linear attention, beside keys and values",
}
_KEYS_AND_VALUES = {"full_attention", "sliding_attention", "chunked_attention", "moe", "mlp"}
"""Types of layers whose memory of a text is at most keys and values."""
_RECURRENT = {"linear_attention", "conv", "hybrid", "hybrid_sliding"}
"""Types of layers that keep the state of a recurrence or a convolution."""
MOST_LAYERS = 10_000
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")


def refuse_other_formats(directory: Path, names: Collection[str]) -> None:
    """Say what the directory holds where that is no checkpoint; an adapter would be dropped without a word.

    names: of its files, some of which may not have been downloaded yet.
    """
    if (adapter := directory / "adapter_config.json").is_file():
        base = read_json(adapter).get("base_model_name_or_path") or "its base model"
        raise CheckpointError(
            f"{directory}: holds an adapter ({adapter.name}) for {base}, not a whole model; name that one, "
            "and give the adapter as --lora DIR"
        )
    files = sorted(name for name in names if name.endswith(".gguf"))
    if files and not any(name.endswith(".safetensors") for name in names):
        raise CheckpointError(
            f"{directory}: holds GGUF weights ({files[0]}); name the file itself: {directory / files[0]}"
        )


def no_config(directory: Path) -> CheckpointError:
    """The error of a directory that has weights and nothing that says of what."""
    return CheckpointError(f"{directory}: no config.json; expected a Hugging Face checkpoint directory")


def other_memory(config: PreTrainedConfig, model_class: Any) -> str | None:
    """What the model remembers of a text that no graph has tensors for; None where nothing is known of such."""
    kinds = getattr(config.get_text_config(), "layer_types", None)
    if kinds is None:
        if getattr(model_class, "_is_stateful", False):
            return "it is a recurrent model: it keeps one state instead of keys and values for every position"
        return None
    other = [kind for kind in kinds if kind not in _KEYS_AND_VALUES]
    layers = f"{len(other)} of its {len(kinds)} layers keep"
    if unknown := [kind for kind in other if kind not in _RECURRENT]:
        return f"{layers} more than keys and values ({unknown[0]}), which the graph has no tensors for"
    code = sys.modules[model_class.__module__] if model_class else None
    if other and code and hasattr(code, "mamba_selective_scan"):  # The function of Mamba's first version.
        return f"{layers} the state of Mamba's selective scan, which no operator of ONNX computes; Mamba 2's converts"
    if other and code and not hasattr(code, "causal_conv1d_fn"):  # A part of every kind that converts.
        return f"{layers} a recurrent state of a kind that specbuild does not know"
    return None
