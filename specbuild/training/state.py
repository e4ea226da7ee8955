"""Runs that have not ended: the draft, its optimizer's state and what the run was asked for, in one directory."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import torch

from specbuild.training.loop import Trainer
from specrun.engine_dir.directories import TRAINING_NAME, new_directory
from specrun.errors import BuildConfigError, CheckpointError, first_line

OPTIMIZER_NAME = "optimizer.pt"
TOOL = "specbuild train_draft"
_LENGTHS = ("steps", "epochs")


def save_run(directory: Path, trainer: Trainer, settings: dict[str, Any], history: list[dict[str, Any]]) -> None:
    """Write a run, whole or not at all; the one before it is replaced."""
    with new_directory(directory, force=True) as work:
        trainer.student.save(work, torch.float32)
        torch.save(trainer.optimizer.state_dict(), work / OPTIMIZER_NAME)
        write_record(work, {"step": trainer.step, "settings": settings, "history": history})


def write_record(directory: Path, record: dict[str, Any]) -> None:
    """Say beside a draft how it was made."""
    text = json.dumps({"tool": TOOL, **record}, indent=2, ensure_ascii=False)
    (directory / TRAINING_NAME).write_text(text + "\n", encoding="utf-8")


def read_run(directory: Path, settings: dict[str, Any]) -> tuple[int, list[dict[str, Any]]]:
    """How far a run is, and its history. It may become longer or shorter.

    Raises CheckpointError; BuildConfigError where other things were asked for.
    """
    try:
        record = json.loads((directory / TRAINING_NAME).read_bytes())
        began, step, history = record["settings"], record["step"], record["history"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{directory}: no run that can be resumed ({error}); give --force to begin anew"
        ) from error
    for name, value in settings.items():
        if name not in _LENGTHS and began.get(name) != value:
            was = "another file" if name == "data" else began.get(name)
            raise BuildConfigError(
                f"--{name}: the run in {directory} began with {was}; give the same, or --force to begin anew"
            )
    return step, history


def load_optimizer(directory: Path, trainer: Trainer) -> None:
    """Let the optimizer go on where it was. Raises CheckpointError."""
    path = directory / OPTIMIZER_NAME
    try:
        trainer.optimizer.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    except (OSError, EOFError, RuntimeError, ValueError, KeyError, TypeError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path}: cannot be read ({first_line(error)}); give --force to begin anew") from error
