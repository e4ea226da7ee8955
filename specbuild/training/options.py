"""What ``specbuild train_draft`` is asked for."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from specbuild.artifacts.resume import beside, checkpoint_of
from specrun.errors import BuildConfigError

Kind = Literal["eagle3", "eagle3.1", "medusa", "model"]
KINDS = get_args(Kind)
DTYPES = ("auto", "float32", "bfloat16")
OPTIMIZERS = ("adamw", "muon")
_DRAFT_LEN: dict[str, int] = {"eagle3": 7, "eagle3.1": 7, "medusa": 5, "model": 5}
"""Default draft lengths by kind, as in the papers."""
_RATE = 0.4
"""Learning rate times the target's width: 1e-4 for 4096, as EAGLE-3's, and more for smaller models."""
_ONLY_FOR = {"draft_vocab_size": "eagle3", "intermediate_size": "eagle3", "num_layers": "model", "hidden_size": "model"}
"""Options for the kinds whose names begin so."""


@dataclass(frozen=True)
class TrainOptions:
    """None: the default of the kind."""

    model: str
    output_dir: str | Path
    kind: Kind
    data: Path | None = None
    prompts: Path | None = None
    draft_vocab_size: int | None = None
    intermediate_size: int | None = None
    num_layers: int | None = None
    hidden_size: int | None = None
    draft_len: int | None = None
    """Drafts of a chain that are trained (eagle3), heads (medusa), and what is compared on held-out text."""
    max_length: int = 2048
    batch_size: int = 8
    epochs: int | None = None
    """Passes over all texts; None: 3, where ``steps`` does not say how many there are."""
    steps: int | None = None
    """Number of steps, in place of epochs."""
    learning_rate: float | None = None
    optimizer: str = "adamw"
    dtype: str = "auto"
    device: str | None = None
    seed: int = 0
    save_steps: int = 200
    revision: str | None = None
    trust_remote_code: bool = False
    resume: bool = False
    force: bool = False

    def __post_init__(self) -> None:
        """Raise BuildConfigError where a value cannot be meant."""
        least = {"max_length": 8, "batch_size": 1, "epochs": 1, "steps": 1, "draft_len": 1, "save_steps": 1}
        least |= {"draft_vocab_size": 1, "intermediate_size": 1, "num_layers": 1, "hidden_size": 1, "seed": 0}
        for name, smallest in least.items():
            if (value := getattr(self, name)) is not None and value < smallest:
                raise BuildConfigError(f"--{name} {value}: expected at least {smallest}")
        for name, kind in _ONLY_FOR.items():
            if getattr(self, name) is not None and not self.kind.startswith(kind):
                raise BuildConfigError(f"--{name} is for --kind {kind}; leave it out with {self.kind}")
        if self.learning_rate is not None and not 0 < self.learning_rate < 1:
            raise BuildConfigError(f"--learning_rate {self.learning_rate}: expected a number between 0 and 1")
        if self.epochs is not None and self.steps is not None:
            raise BuildConfigError("--epochs cannot be combined with --steps")
        if (self.data is None) == (self.prompts is None):
            raise BuildConfigError("expected --data or --prompts, and not both")
        for option, path in (("--data", self.data), ("--prompts", self.prompts)):
            if path is not None and not path.is_file():
                raise BuildConfigError(f"{option} {path}: no such file")

    @property
    def num_epochs(self) -> int:
        """``epochs``, or what is usual."""
        return self.epochs or 3

    @property
    def num_drafts(self) -> int:
        """``draft_len``, or what is usual."""
        return self.draft_len or _DRAFT_LEN[self.kind]

    @property
    def checkpoint(self) -> Path:
        """Where a run is kept that has not ended."""
        return checkpoint_of(self.output_dir)

    @property
    def answers(self) -> Path:
        """Where the target's answers to ``prompts`` go."""
        return beside(self.output_dir, ".data.jsonl")

    def rate(self, hidden_size: int) -> float:
        """The learning rate for a target of this width."""
        return self.learning_rate or _RATE / hidden_size

    def settings(self) -> dict[str, Any]:
        """What decides the weights that come out: the same for a run that goes on."""
        sizes = ("draft_vocab_size", "intermediate_size", "num_layers", "hidden_size", "max_length", "batch_size")
        pace = ("steps", "learning_rate", "optimizer", "dtype", "seed")
        settings = {name: getattr(self, name) for name in ("model", "kind", *sizes, *pace)}
        with (self.data or self.answers).open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return {**settings, "draft_len": self.num_drafts, "epochs": self.num_epochs, "data": digest}
