"""Every dialect's head drafts what its formula says, from the features of its target, in engines or in torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from specbuild.convert.verify_head import reference_chain
from specbuild.heads.module import HeadModule
from tests.helpers.families import VOCAB
from tests.helpers.heads.as_read import as_read as read
from tests.helpers.heads.made import (
    DIALECTS,
    LAYERS,
    Dialect,
    head_tensors,
    make_pair,
    prefilled,
    save_head,
    states_of,
    target_matrix,
)
from tests.helpers.heads.reference import chain, fused

TEXTS = [[5, 9, 200, 31, 7, 7, 120, 64, 2], [300, 4, 81, 17]]
DRAFTS = [[44, 260, 9], [12, 13, 310]]
VERIFIED = ("eagle", "eagle, version 1", "speculators, two layers")
"""Dialects whose conversion is compared with torch by ``convert`` as well."""
ONLY_READ = ("specforge", "angelslim", "modelopt")
"""Dialects that are another way of writing what others compute: compared in torch, without engines."""
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


def as_read(target: Path, head: Path) -> list[torch.Tensor]:
    """The same in torch, of what ``convert`` would export."""
    model, features = read(target, head, TEXTS)
    assert isinstance(model, HeadModule)
    texts = [np.array([*text, *drafts]) for text, drafts in zip(TEXTS, DRAFTS, strict=True)]
    return [
        torch.from_numpy(reference_chain(model, texts[row], features[row], len(TEXTS[row])))
        for row in range(len(TEXTS))
    ]


def difference(expected: torch.Tensor, found: torch.Tensor) -> float:
    """The largest, as a share of the largest logit."""
    drafted = expected.isfinite()
    assert (found.isneginf() == ~drafted).all()
    return float((found[drafted] - expected[drafted]).abs().max() / expected[drafted].abs().max())


@pytest.mark.parametrize("name", DIALECTS)
def test_logits_along_a_chain(target: Path, tmp_path: Path, name: str) -> None:
    """And the check sees another layer, another place of the norm, and features of other positions."""
    dialect, head = DIALECTS[name], save_head(tmp_path / "hf", name)
    if name in ONLY_READ:
        rows = as_read(target, head)
    else:
        rows = found(make_pair(target, head, tmp_path / "pair", verify=name in VERIFIED))
    assert len(rows) == len(TEXTS)
    for row, logits in enumerate(rows):
        assert logits.shape == (1 + len(DRAFTS[row]), VOCAB)
        assert difference(expected(target, dialect, name, row), logits) < TOLERANCE
    for wrong in wrong_readings(dialect):
        assert difference(expected(target, wrong, name, 0), rows[0]) > 100 * TOLERANCE, wrong
    assert difference(expected(target, dialect, name, 0, shift=1), rows[0]) > 100 * TOLERANCE


def wrong_readings(dialect: Dialect) -> Iterator[Dialect]:
    """What the configuration might be mistaken for."""
    if "eagle1" in dialect.flags:
        return
    yield replace(dialect, reads=tuple((layer + 1) % (LAYERS + 1) for layer in dialect.reads))
    for flag in ("norm_before_residual", "norm_output"):
        yield replace(dialect, flags=dialect.flags ^ {flag})
    for flag in dialect.flags & {"fc_norm", "norm_before_fc", "qk_norm"}:
        yield replace(dialect, flags=dialect.flags - {flag})
    yield replace(dialect, theta=dialect.theta * 10)
