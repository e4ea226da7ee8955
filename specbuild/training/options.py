"""What ``specbuild train_draft`` and ``prepare_data`` are asked for."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from specbuild.artifacts.resume import beside, checkpoint_of
from specrun.errors import BuildConfigError

Kind = Literal["eagle3", "eagle3.1", "model"]
_DRAFT_LEN: dict[str, int] = {"eagle3": 7, "eagle3.1": 7, "model": 5}
"""Default draft lengths by kind, as in the papers."""
_RATE = 0.4
"""Learning rate times the target's width: 1e-4 for 4096, as EAGLE-3's, and more for smaller models."""
_ONLY_FOR = {"draft_vocab_size": "eagle3", "intermediate_size": "eagle3", "num_layers": "model", "hidden_size": "model"}
"""Options for the kinds whose names begin so."""


@dataclass(frozen=True)
class TrainOptions:
    """What ``specbuild train_draft`` was asked for. None: the default of the kind."""

    model: str
    """The target: a checkpoint, or its Hub ID."""
    output_dir: str | Path
    """Directory of the new draft."""
    kind: Kind
    """Kind of the draft. model: an ordinary draft model."""
    data: Path | None = None
    """JSON lines: conversations, or a 'text'."""
    prompts: Path | None = None
    """Prompts that the target answers first."""
    draft_vocab_size: int | None = None
    """EAGLE: size of its vocabulary, the data's commonest tokens."""
    intermediate_size: int | None = None
    """EAGLE: width of its MLP. Default: the target's."""
    num_layers: int | None = None
    """model: target layers to keep. Default: half."""
    hidden_size: int | None = None
    """model: another width, from scratch."""
    draft_len: int | None = None
    """Drafts of a chain. Default: 7 for EAGLE, else 5.

    It is also what is compared on held-out text."""
    max_length: int = 2048
    """Most tokens of a text; the rest is cut off."""
    batch_size: int = 8
    """Number of texts in a step."""
    epochs: int | None = None
    """Passes over all texts. Default: 3."""
    steps: int | None = None
    """Steps, instead of epochs."""
    learning_rate: float | None = None
    """Learning rate. Default: 0.4 / the target's width."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Dtype of the computation."""
    device: str | None = None
    """cpu, cuda or cuda:N. Default: a GPU if PyTorch finds one."""
    seed: int = 0
    """Seed of new weights and the texts' order."""
    save_steps: int = 200
    """Steps between comparisons and checkpoints."""
    revision: str | None = None
    """Branch, tag or commit of a Hub ID."""
    trust_remote_code: bool = False
    """Run Python code that comes with the checkpoint."""
    resume: bool = False
    """Continue a run that was stopped."""
    force: bool = False
    """Replace output_dir, and what a stopped run left."""

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


@dataclass(frozen=True)
class PrepareOptions:
    """What ``specbuild prepare_data`` was asked for."""

    prompts: Path
    """JSON lines, or a user's turn a line."""
    output_file: Path
    """File of the answers, one JSON line each."""
    engine_dir: Path | None = None
    """Engine directory of the target, which answers."""
    draft_engine_dir: Path | None = None
    """A draft's engine directory, for speed."""
    server: str | None = None
    """A server of the target (OpenAI's API), instead of an engine."""
    model: str | None = None
    """The target's name on the server. Default: its first model."""
    concurrency: int | None = None
    """Prompts that a server gets at a time. Default: 16."""
    max_output_len: int = 512
    """Most tokens of an answer."""
    temperature: float = 0.7
    """0: greedy."""
    seed: int = 0
    """A prompt's seed is this plus its line."""
    resume: bool = False
    """Answer what output_file has no answer to yet."""

    def __post_init__(self) -> None:
        """Raise BuildConfigError where a value cannot be meant."""
        if (self.engine_dir is None) == (self.server is None):
            raise BuildConfigError("expected --engine_dir or --server, and not both")
        if self.draft_engine_dir is not None and self.engine_dir is None:
            raise BuildConfigError("--draft_engine_dir needs --engine_dir")
        for name in ("model", "concurrency"):
            if getattr(self, name) is not None and self.server is None:
                raise BuildConfigError(f"--{name} needs --server")
        for name, least in (("concurrency", 1), ("max_output_len", 1), ("seed", 0), ("temperature", 0)):
            if (value := getattr(self, name)) is not None and value < least:
                raise BuildConfigError(f"--{name} {value}: expected at least {least}")
