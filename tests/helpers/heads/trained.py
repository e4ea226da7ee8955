"""A head that was trained for some seconds on what its target writes: enough for a part of its drafts to be right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM

from tests.helpers.families import VOCAB
from tests.helpers.heads.made import DIALECTS, Tensors, head_tensors, states_of, target_matrix
from tests.helpers.heads.reference import fused, layers, rms

PROMPTS = [[5, 9, 200], [*range(30, 50)], [17], [300, 4, 4, 4, 81, 9]]
LENGTH = 52
"""Tokens of each prompt and what follows it: the head knows these texts by heart."""
_STEPS, _CHAIN = 250, 3
_OTHERS = 40
"""Tokens that may be drafted beside those of the texts: the first of the vocabulary."""


def continued(target: Path) -> torch.Tensor:
    """[B, LENGTH]: each prompt, and what the target writes greedily behind it."""
    model: Any = AutoModelForCausalLM.from_pretrained(target).eval()
    texts = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        texts.append(model.generate(ids, max_new_tokens=LENGTH - len(prompt), **options)[0])
    return torch.stack(texts)


def train(name: str, target: Path) -> Tensors:
    """Tensors of a dialect with a reduced vocabulary, trained on the target's own tokens: sum of 0.8**k in a chain."""
    dialect = DIALECTS[name]
    tensors = {key: tensor.clone() for key, tensor in head_tensors(name).items()}
    trained = {key: tensor.requires_grad_() for key, tensor in tensors.items() if tensor.is_floating_point()}
    embedding = target_matrix(target, "embed_tokens")
    texts = continued(target)
    states = states_of(target, texts)
    # The head may draft what the texts have, and some others.
    ids = torch.unique(torch.cat([texts.flatten(), torch.arange(VOCAB)])[: texts.numel() + _OTHERS])
    tensors["d2t"] = ids - torch.arange(len(ids))
    tensors["lm_head.weight"] = trained["lm_head.weight"] = torch.randn(
        len(ids), dialect.width, generator=torch.Generator().manual_seed(0)
    ).requires_grad_()
    del tensors["t2d"]
    slots = torch.full((VOCAB,), -100).index_put((ids,), torch.arange(len(ids)))
    optimizer = torch.optim.Adam(trained.values(), lr=3e-3)
    for _ in range(_STEPS):
        hidden, loss = fused(dialect, tensors, states)[:, :-1], torch.tensor(0.0)
        for step in range(_CHAIN):
            # Row i stands at position i + 1: token i + 1, the feature of position i, and says token i + 2.
            y = layers(dialect, tensors, embedding[texts[:, 1:]], hidden)
            normed = rms(y, tensors["norm.weight"])
            logits = normed[:, :-1] @ tensors["lm_head.weight"].T
            wanted = slots[texts[:, 2:]]
            loss = loss + 0.8**step * functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())
            # In a chain the features are its own. Nothing is before the first.
            hidden = torch.cat([hidden[:, :1], y[:, :-1]], dim=1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {key: tensor.detach() for key, tensor in tensors.items()}
