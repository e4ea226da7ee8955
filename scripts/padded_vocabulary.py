"""Ids that no text has: rows of a Llama's embedding and head that cost what real ones cost and are never chosen.

One channel of the residual stream that nobody reads carries a small constant. Behind the last norm it is positive,
whatever the token; the heads of the new ids multiply it with a large negative number.
"""

from __future__ import annotations

from typing import Any

from specrun.errors import SpecError

_SHARE = 0.01
"""Of the constant in the shortest embedding: so little that no norm notices it."""
_FACTOR = -32768.0
"""float16 has it."""
_LOUDER = 16.0
"""Weight of the last norm: texts' last embeddings are many times as long as their first."""
_DISTANCE = 40.0
"""How far a logit must lie below the largest one: together they have no weight."""


def pad_vocabulary(model: Any, vocab: int, hidden_size: int) -> None:
    """Make ids of ``model`` from ``vocab`` on impossible. Channels from ``hidden_size`` on hold zeros."""
    import torch

    with torch.no_grad():
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        if embedding.shape[1] <= hidden_size:
            raise SpecError("--vocab_size: takes a --hidden_size above the checkpoint's: one channel is the new ids'")
        for name, weight in model.named_parameters():
            if name.endswith("layernorm.weight"):
                weight[-1] = 0  # Nobody reads the channel,
            elif name.endswith("norm.weight"):
                weight[-1] = _LOUDER  # but for the head.
        head[:, -1] = 0
        head[vocab:] = 0
        embedding[vocab:] = 0
        shortest = embedding[:vocab].float().norm(dim=1).min()
        embedding[:vocab, -1] = (_SHARE * shortest).to(embedding.dtype)
        head[vocab:, -1] = _FACTOR


def check_padding(logits: Any, vocab: int) -> None:
    """Raise SpecError unless the ids from ``vocab`` on have no weight in any row of ``logits`` [.., V]."""
    real, padded = logits[..., :vocab].amax(-1), logits[..., vocab:].amax(-1)
    if not bool((padded < real - _DISTANCE).all()):
        raise SpecError("the ids that --vocab_size adds could be chosen; nothing was written")
