"""TARGET and DRAFT of a command: engine directories, or checkpoints of which engines are built first."""

from __future__ import annotations

import os
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple, get_args

import click

from specrun.builder import BuildOptions, OnStart, engines_of, is_checkpoint
from specrun.command_line import FolderPath
from specrun.commands.config_file import config_option
from specrun.commands.options import draft_option, first_given, given, tokenizer_dir_option
from specrun.config import Check, DraftKind, DraftTargetConfig
from specrun.devices.processor import THREADS
from specrun.errors import EngineDirError
from specrun.field_options import field_options, packed, together

Model = str | Path
"""A checkpoint as it is named, or the path of an engine."""


def _set_threads(_context: click.Context, _option: click.Parameter, threads: int | None) -> None:
    if threads is not None:
        os.environ[THREADS] = str(threads)  # Processes that build engines have as many.


threads_option = click.option(
    "--threads",
    type=click.IntRange(1),
    expose_value=False,
    callback=_set_threads,
    help=f"Threads of CPU engines. Default: {THREADS}, or one a core that this process may use.",
)
_CHECKPOINTS = field_options(
    BuildOptions,
    *("kv_cache_dtype", "max_seq_len", "tp_size", "verify", "device", "revision", "trust_remote_code", "text_model"),
    "lora",
)
_BUILD = together(field_options(BuildOptions, "qformat", "max_batch_size"), _CHECKPOINTS)
build_argument = packed("build", BuildOptions)


class Engines(NamedTuple):
    """The engines of models."""

    name: str
    """The target's name, for people."""
    target: Path
    draft: Path | None
    tokenizer_dir: Path | None


@dataclass(frozen=True)
class Models:
    """TARGET and DRAFT, and how engines of checkpoints are built."""

    target: Model
    draft: Model | None
    tokenizer_dir: Path | None
    build: BuildOptions

    def require_draft(self, config: DraftTargetConfig) -> None:
        """Raise click's UsageError where nothing drafts."""
        if not (self.draft or config.draft):
            raise click.UsageError("give DRAFT, or --draft suffix")

    @property
    def name(self) -> str:
        """The target's name, for people."""
        is_hub_id = isinstance(self.target, str) and not Path(self.target).expanduser().is_dir()
        return str(self.target) if is_hub_id else Path(self.target).expanduser().resolve().name

    def engines(
        self,
        *,
        for_chat: bool = False,
        chat_template: Path | None = None,
        check: Check = "quick",
        started: OnStart = lambda _stop: None,
    ) -> Engines:
        """The engines, which are built where the cache lacks them. Arguments and errors as for ``engines_of``."""
        target, draft = engines_of(
            self.target,
            self.draft,
            self.build,
            for_chat=for_chat,
            chat_template=chat_template,
            check=check,
            meanwhile=_load_decoder,
            started=started,
        )
        return Engines(self.name, target, draft, self.tokenizer_dir)


def _models(
    target: str | None,
    draft_model: str | None,
    short_target: str | None,
    engine_dir: Path | None,
    draft_engine_dir: Path | None,
    tokenizer_dir: Path | None,
    build: BuildOptions,
) -> Models:
    """Raises click's UsageError, and EngineDirError for a model that is not there."""
    if short_target and target is not None:
        raise click.UsageError("-m cannot be combined with TARGET, which says the same")
    named = _one_of("engine_dir", engine_dir, "TARGET", target or short_target)
    draft = _one_of("draft_engine_dir", draft_engine_dir, "DRAFT", draft_model)
    if named is None:
        raise click.UsageError("give TARGET: a checkpoint's directory, its Hub ID, or an engine directory")
    _refuse_build_options(named, draft)
    return Models(named, draft, tokenizer_dir, build)


def _one_of(option: str, engine: Path | None, name: str, model: str | None) -> Model | None:
    if model is None:
        return engine
    if engine is not None:
        raise click.UsageError(f"--{option} cannot be combined with {name}, which says the same")
    return read_model(model, name)


models_options = together(
    build_argument,
    packed("models", _models),
    config_option,
    click.argument("target", required=False, metavar="TARGET"),
    click.argument("draft_model", required=False, metavar="[DRAFT]"),
    click.option("-m", "short_target", metavar="TARGET", help="The same as TARGET."),
    click.option("--engine_dir", type=FolderPath, hidden=True),  # TensorRT-LLM's names.
    click.option("--draft_engine_dir", type=FolderPath, hidden=True),
    draft_option,
    tokenizer_dir_option,
    threads_option,
    _BUILD,
    field_options(BuildOptions, "max_draft_len", "draft_vocab_size", "draft_revision"),
)
"""Options of every command that opens a target, or a target and its draft."""
target_options = together(
    build_argument,
    config_option,
    click.argument("target", metavar="TARGET"),
    tokenizer_dir_option,
    threads_option,
    _BUILD,
)
"""Options of a command that opens a target alone."""
candidate_options = together(
    build_argument,
    click.argument("target", metavar="TARGET"),
    click.argument("drafts", nargs=-1, metavar="[DRAFT|suffix]..."),
    tokenizer_dir_option,
    _CHECKPOINTS,
    field_options(BuildOptions, "max_draft_len"),
)
"""Options of a command that compares drafts and formats of a target."""


def read_target(target: str, base: str | None = None) -> Model:
    """TARGET. base: the model of ``--base``. Raises click's UsageError, and EngineDirError where it is not there."""
    model = read_model(target, "TARGET")
    _refuse_build_options(model, base and read_model(base, "--base"))
    return model


def read_candidates(target: str, drafts: tuple[str, ...]) -> tuple[Model, list[Model]]:
    """A target and its drafts. Raises click's UsageError, and EngineDirError for a model that is not there."""
    kinds = get_args(DraftKind)
    model = read_model(target, "TARGET")
    models = [draft if draft in kinds else read_model(draft, "DRAFT") for draft in drafts]
    if given("qformats") and not isinstance(model, str):
        raise click.UsageError("--qformat is for checkpoints, of which engines are built; give one as TARGET")
    _refuse_build_options(model, *(draft for draft in models if draft not in kinds))
    return model, models


def _refuse_build_options(*models: Model | None) -> None:
    """Raise click's UsageError where options say how to build, and none of the models is a checkpoint."""
    flag = first_given(*(field.name for field in fields(BuildOptions)))
    if flag and not any(isinstance(model, str) for model in models):
        raise click.UsageError(f"{flag} is for checkpoints, of which engines are built; give one as TARGET")


def read_model(model: str, name: str) -> Model:
    """A model that is called ``name`` in messages. Raises EngineDirError where it is not there."""
    path = Path(model).expanduser()
    if is_checkpoint(model):
        return model
    if not path.is_dir():
        raise EngineDirError(
            f"{model}: no such directory; {name} wants a checkpoint's directory, its Hub ID (owner/name), or an engine "
            "directory"
        )
    return path


def _load_decoder() -> None:
    """What opens the engines, loaded while another process looks for them."""
    import specrun.decoder  # noqa: F401
