"""A target and a pair with a trained head, made once a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import once
from tests.heads.made import make_pair, save_head, save_target
from tests.heads.medusa import save_medusa, trained_heads
from tests.heads.trained import train

TRAINED = "specforge"


@pytest.fixture(scope="session")
def target(shared: Path) -> Path:
    """A random target's checkpoint."""
    return once(shared / "heads_target", save_target)


@pytest.fixture(scope="session")
def pair(shared: Path, target: Path) -> Path:
    """``target`` and ``head``: engines, and the head's checkpoint in ``hf``. The head is trained on a few texts."""

    def make(root: Path) -> None:
        tensors = train(TRAINED, target)
        head = save_head(root / "hf", TRAINED, tensors, draft_vocab_size=len(tensors["d2t"]))
        make_pair(target, head, root)

    return once(shared / "heads_pair", make)


@pytest.fixture(scope="session")
def medusa(shared: Path, target: Path) -> Path:
    """As ``pair``, with Medusa heads."""

    def make(root: Path) -> None:
        head = save_medusa(root / "hf", "safetensors", trained_heads(target), target)
        make_pair(target, head, root)

    return once(shared / "medusa_pair", make)
