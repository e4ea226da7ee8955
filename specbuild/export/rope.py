"""Pin rotary embeddings that change with the sequence's length (longrope, dynamic NTK) to one length.

Their frequencies follow the largest position *in the batch*, so a row's text would depend on its neighbours. An
engine has one ``max_seq_len``; the frequencies for it are chosen here, once.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def pin_rope(model: nn.Module, max_seq_len: int) -> list[str]:
    """Fix every length-dependent rotary module of ``model`` for ``max_seq_len`` tokens; returns notes for people."""
    notes = []
    for module in model.modules():
        kinds: Any = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            notes += _pin(module, kinds, None, max_seq_len)
        elif isinstance(kinds, dict):
            for layer_type, kind in list(kinds.items()):
                notes += _pin(module, kind, layer_type, max_seq_len)
    return sorted(set(notes))


def _pin(module: Any, kind: str, layer_type: str | None, max_seq_len: int) -> list[str]:
    if kind != "longrope" and "dynamic" not in kind:
        return []
    prefix = f"{layer_type}_" if layer_type else ""
    parameters = module.config.rope_parameters
    parameters = parameters[layer_type] if layer_type else parameters
    original = parameters.get("original_max_position_embeddings") or module.config.max_position_embeddings
    by_layer = {"layer_type": layer_type} if layer_type else {}
    frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](module.config, None, seq_len=max_seq_len, **by_layer)
    setattr(module, f"{prefix}inv_freq", frequencies)
    setattr(module, f"{prefix}attention_scaling", scaling)
    # "default" keeps the model's forward from choosing frequencies again.
    if layer_type:
        module.rope_type[layer_type] = "default"
    else:
        module.rope_type = "default"
    choice = "long" if max_seq_len > original else "short"
    return [f"{kind}: {choice} frequencies, fixed for max_seq_len {max_seq_len} (trained length {original})"]
