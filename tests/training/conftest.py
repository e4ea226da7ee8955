"""A target, its answers, and an EAGLE-3 head trained on them, made once a session."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from specbuild.training.data.prepare import prepare_data
from specbuild.training.options import PrepareOptions
from tests.helpers.character_model import LENGTH, PROMPTS, save_target, train
from tests.helpers.engines import make_engine, make_onnx, once, quiet
from tests.helpers.heads.made import make_pair
from tests.helpers.trained_drafts import SMALL


@pytest.fixture(scope="session")
def target(shared: Path) -> Path:
    """A checkpoint."""
    return once(shared / "training_target", save_target)


@pytest.fixture(scope="session")
def answered(shared: Path, target: Path) -> Path:
    """``engine`` of the target, ``prompts.txt``, and ``data.jsonl`` with its greedy answers."""

    def make(root: Path) -> None:
        make_engine(make_onnx(target, root / "onnx", verify=False), root / "engine", **SMALL)
        (root / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
        options: dict[str, Any] = {"engine_dir": root / "engine", "max_output_len": LENGTH, "temperature": 0.0}
        prepare_data(PrepareOptions(root / "prompts.txt", root / "data.jsonl", **options), quiet())

    return once(shared / "training_answers", make)


@pytest.fixture(scope="session")
def trained(shared: Path, target: Path, answered: Path) -> Path:
    """``hf``: an EAGLE-3.1 head that knows the answers, and ``pair``: engines."""

    def make(root: Path) -> None:
        options = {
            "draft_vocab_size": 40,
            "intermediate_size": 150,
            "draft_len": 3,
            "steps": 120,
            "learning_rate": 8e-3,
        }
        train(target, root / "hf", "eagle3.1", answered / "data.jsonl", **options)
        make_pair(target, root / "hf", root / "pair")

    return once(shared / "training_head", make)
