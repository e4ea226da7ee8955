"""Every dialect's head drafts what its formula says, from the features of its target, in engines or in torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from scripts.fuzz_bit_exact import fuzz
from specbuild.convert.verify_head import reference_chain
from specbuild.heads.module import HeadModule
from tests.helpers.engines import make_engine
from tests.helpers.families import VOCAB, save_checkpoint
from tests.helpers.heads.agreement import DRAFTS, TEXTS, TOLERANCE, difference, expected, found
from tests.helpers.heads.as_read import as_read as read
from tests.helpers.heads.dflash import save_block_head
from tests.helpers.heads.made import (
    DIALECTS,
    LAYERS,
    SMALL,
    Dialect,
    make_pair,
    save_head,
)
from tests.helpers.heads.medusa import random_heads, save_medusa

VERIFIED = ("eagle", "eagle, version 1", "speculators, two layers")
"""Dialects whose conversion is compared with torch by ``convert`` as well."""
ONLY_READ = ("specforge", "angelslim", "modelopt")
"""Dialects that are another way of writing what others compute: compared in torch, without engines."""


def as_read(target: Path, head: Path) -> list[torch.Tensor]:
    """The same in torch, of what ``convert`` would export."""
    model, features = read(target, head, TEXTS)
    assert isinstance(model, HeadModule)
    texts = [np.array([*text, *drafts]) for text, drafts in zip(TEXTS, DRAFTS, strict=True)]
    return [
        torch.from_numpy(reference_chain(model, texts[row], features[row], len(TEXTS[row])))
        for row in range(len(TEXTS))
    ]


@pytest.mark.quick("specforge, 3.1")
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


@pytest.mark.quick("lfm2")
@pytest.mark.parametrize(("family", "ranks"), [("qwen3_5", 1), ("lfm2", 1), ("llama3", 2)])
def test_features_of_other_targets(family: str, ranks: int, tmp_path: Path) -> None:
    """Of layers that are recurrent, and of several ranks."""
    target = save_checkpoint(tmp_path / "target", family, num_hidden_layers=LAYERS)
    pair = make_pair(target, save_head(tmp_path / "head", "eagle"), tmp_path / "pair")
    if ranks > 1:
        build = {**SMALL, "tp_size": ranks}
        make_engine(pair / "onnx" / "target", tmp_path / "ranks", **build).rename(pair / "of ranks")
        (pair / "target").rename(pair / "of one")
        (pair / "of ranks").rename(pair / "target")
    for row, logits in enumerate(found(pair)):
        assert difference(expected(target, DIALECTS["eagle"], "eagle", row), logits) < TOLERANCE


@pytest.mark.slow("test_features_of_other_targets")
@pytest.mark.parametrize("kind", ["medusa", "dflash"])
def test_other_heads_of_recurrent_targets(kind: str, tmp_path: Path) -> None:
    """Texts are the target's own, whatever these heads propose."""
    target = save_checkpoint(tmp_path / "target", "qwen3_5", num_hidden_layers=LAYERS)
    if kind == "medusa":
        head = save_medusa(tmp_path / "head", "safetensors", random_heads(), target)
    else:
        head = save_block_head(tmp_path / "head", "z-lab")
    pair = make_pair(target, head, tmp_path / "pair", verify=True)
    tally = fuzz(pair / "target", [pair / "head"], 24, seed=2)
    assert (tally.different_texts, tally.different_logprobs) == (0, 0)
    assert tally.evaluated > 500


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
