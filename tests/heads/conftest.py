"""A target and a pair with a trained head, made once a session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.engines import once
from tests.helpers.heads.dflash import save_block_head, train_blocks
from tests.helpers.heads.made import make_pair, save_head, save_target
from tests.helpers.heads.medusa import save_medusa, trained_heads
from tests.helpers.heads.trained import train

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


@pytest.fixture(scope="session")
def dflash(shared: Path, target: Path) -> Path:
    """As ``pair``, with a DFlash head."""
    return once(shared / "dflash_pair", lambda root: make_blocks(root, "z-lab", target))


@pytest.fixture(scope="session")
def dspark(shared: Path, target: Path) -> Path:
    """As ``pair``, with a DSpark head that has a Markov head and a confidence head."""
    return once(shared / "dspark_pair", lambda root: make_blocks(root, "modelopt", target))


def make_blocks(root: Path, dialect: str, target: Path) -> None:
    make_pair(target, save_block_head(root / "hf", dialect, train_blocks(dialect, target)), root)
