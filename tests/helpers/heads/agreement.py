"""What a head drafts beside what its formula says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from tests.helpers.heads.made import (
    Dialect,
    head_tensors,
    prefilled,
    states_of,
    target_matrix,
)
from tests.helpers.heads.reference import chain, fused

TEXTS = [[5, 9, 200, 31, 7, 7, 120, 64, 2], [300, 4, 81, 17]]


DRAFTS = [[44, 260, 9], [12, 13, 310]]


TOLERANCE = 2e-4
"""Of the largest logit."""


def expected(target: Path, dialect: Dialect, name: str, row: int, shift: int = 0) -> torch.Tensor:
    """What the head says to a text and its drafts. shift: of the features, by positions."""
    text, tensors = TEXTS[row], head_tensors(name)
    if "lm_head.weight" not in tensors:
        tensors = {**tensors, "lm_head.weight": target_matrix(target, "lm_head")}
    embedding = tensors["embed_tokens.weight"] if dialect.embeds else target_matrix(target, "embed_tokens")
    features = fused(dialect, tensors, states_of(target, torch.tensor([text])))[0].roll(shift, 0)
    return chain(dialect, tensors, embedding, features, [*text, *DRAFTS[row]], len(text))


def found(pair: Path) -> list[torch.Tensor]:
    """The same from engines, both rows at once."""
    _, head = prefilled(pair, [text[:-1] for text in TEXTS])
    steps = [head.forward(TEXTS, [1, 1])[:, 0].copy()]
    steps += [head.extend(list(tokens))[:, 0].copy() for tokens in zip(*DRAFTS, strict=True)]
    return [torch.from_numpy(np.stack([step[row] for step in steps])) for row in range(2)]


def difference(expected: torch.Tensor, found: torch.Tensor) -> float:
    """The largest, as a share of the largest logit."""
    drafted = expected.isfinite()
    assert (found.isneginf() == ~drafted).all()
    return float((found[drafted] - expected[drafted]).abs().max() / expected[drafted].abs().max())
