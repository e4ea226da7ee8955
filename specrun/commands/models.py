"""TARGET and DRAFT of a command: engine directories, or checkpoints of which engines are built first."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import click

from specrun.builder import BuildOptions, engines_of, is_checkpoint
from specrun.command_line import FolderPath
from specrun.commands.config_file import config_option
from specrun.commands.options import draft_option, given, together, tokenizer_dir_option
from specrun.config import DraftKind
from specrun.devices.processor import THREADS
from specrun.engine_dir.config import CacheForm
from specrun.errors import EngineDirError

QFORMATS = ("auto", "int8", "int8_wo", "int4", "int4_sym", "fp8", "fp8_wo", "nvfp4", "nvfp4_wo")
"""Values of ``--qformat`` of ``specbuild convert``, which this package does not import."""
_BUILD = tuple(field.name for field in fields(BuildOptions))

_QFORMAT = click.option(
    "--qformat",
    type=click.Choice(QFORMATS),
    default=BuildOptions.qformat,
    show_default=True,
    help="Format of both models' weights. auto: as they are.",
)
_MAX_BATCH_SIZE = click.option(
    "--max_batch_size",
    type=click.IntRange(1),
    default=BuildOptions.max_batch_size,
    show_default=True,
    help="Most texts in a batch.",
)
_MAX_DRAFT_LEN = click.option(
    "--max_draft_len",
    type=click.IntRange(1),
    default=BuildOptions.max_draft_len,
    show_default=True,
    help="Most draft tokens a round.",
)
_CHECKPOINTS = together(
    click.option(
        "--kv_cache_dtype",
        type=click.Choice(get_args(CacheForm)),
        default=BuildOptions.kv_cache_dtype,
        show_default=True,
        help="Bits of stored keys and values. auto: float32.",
    ),
    click.option(
        "--max_seq_len",
        type=click.IntRange(2),
        help="Most tokens of prompt and output. Default: 4096, or the models' limit.",
    ),
    click.option(
        "--tp_size",
        type=click.IntRange(1),
        default=BuildOptions.tp_size,
        show_default=True,
        help="Ranks that compute TARGET together (tensor parallel).",
    ),
    click.option(
        "--verify/--no-verify",
        default=BuildOptions.verify,
        show_default=True,
        help="Compare what is converted with the Hugging Face model.",
    ),
    click.option("--device", metavar="cpu|cuda|cuda:N", help="The engines' device. Default: a GPU if there is one."),
    click.option("--revision", help="Branch, tag or commit of TARGET, for a Hub ID."),
    click.option("--trust_remote_code", is_flag=True, help="Run Python code that comes with the checkpoints."),
    click.option("--text_model", is_flag=True, help="Take the language model inside a multimodal TARGET."),
)
build_options = together(_QFORMAT, _MAX_BATCH_SIZE, _CHECKPOINTS)
"""The fields of ``BuildOptions`` that a target alone has."""


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

models_options = together(
    config_option,
    click.argument("target", required=False, metavar="TARGET"),
    click.argument("draft_model", required=False, metavar="[DRAFT]"),
    click.option("-m", "short_target", metavar="TARGET", help="The same as TARGET."),
    click.option("--engine_dir", type=FolderPath, help="The target's engine directory, instead of TARGET."),
    click.option("--draft_engine_dir", type=FolderPath, help="The draft's engine directory, instead of DRAFT."),
    draft_option,
    tokenizer_dir_option,
    threads_option,
    build_options,
    _MAX_DRAFT_LEN,
    click.option("--draft_vocab_size", type=click.IntRange(1), help="Draft only so many tokens of DRAFT's vocabulary."),
    click.option("--draft_revision", help="The same as --revision, of DRAFT."),
)
"""Options of every command that opens a target, or a target and its draft."""
target_options = together(
    config_option, click.argument("target", metavar="TARGET"), tokenizer_dir_option, threads_option, build_options
)
"""Options of a command that opens a target alone."""
candidate_options = together(
    click.argument("target", metavar="TARGET"),
    click.argument("drafts", nargs=-1, metavar="[DRAFT|suffix]..."),
    click.option(
        "--qformat",
        "qformats",
        type=click.Choice(QFORMATS),
        multiple=True,
        default=[BuildOptions.qformat],
        show_default=True,
        help="Format of a checkpoint's weights to try; may be repeated.",
    ),
    tokenizer_dir_option,
    _CHECKPOINTS,
    _MAX_DRAFT_LEN,
)
"""Options of a command that compares drafts and formats of a target."""


def take_models(options: dict[str, Any], draft_needed: bool = False) -> BuildOptions:
    """Take TARGET, DRAFT and ``build_options`` out of ``options``; set ``engine_dir`` and ``draft_engine_dir``.

    Checkpoints are strings there, until ``build_models`` replaces them; engine directories are paths. Raises click's
    UsageError, and EngineDirError for a model that is not there.
    """
    given_models = {"engine_dir": options.pop("target"), "draft_engine_dir": options.pop("draft_model")}
    if short := options.pop("short_target"):
        if given_models["engine_dir"] is not None:
            raise click.UsageError("-m cannot be combined with TARGET, which says the same")
        given_models["engine_dir"] = short
    built = _take_build(options)
    for option, name in (("engine_dir", "TARGET"), ("draft_engine_dir", "DRAFT")):
        if (model := given_models[option]) is None:
            continue
        if options[option] is not None:
            raise click.UsageError(f"--{option} cannot be combined with {name}, which says the same")
        options[option] = _read(model, name)
    target, draft = options["engine_dir"], options["draft_engine_dir"]
    if target is None:
        raise click.UsageError("give TARGET: a checkpoint's directory, its Hub ID, or an engine directory")
    if draft_needed and not (draft or options["draft"]):
        raise click.UsageError("give DRAFT, or --draft suffix")
    _refuse_build_options(target, draft)
    return built


def take_target(options: dict[str, Any], base: str | None = None) -> tuple[str | Path, BuildOptions]:
    """Take TARGET and ``build_options`` out of ``options``. base: the model of ``--base``.

    Raises click's UsageError, and EngineDirError for a model that is not there.
    """
    target, built = _read(options.pop("target"), "TARGET"), _take_build(options)
    _refuse_build_options(target, base and _read(base, "--base"))
    return target, built


def take_candidates(options: dict[str, Any]) -> tuple[str | Path, list[str | Path], BuildOptions]:
    """Take a target, its drafts and how to build them out of ``options`` of ``candidate_options``.

    Raises click's UsageError, and EngineDirError for a model that is not there.
    """
    target = _read(options.pop("target"), "TARGET")
    drafts = [draft if draft in get_args(DraftKind) else _read(draft, "DRAFT") for draft in options.pop("drafts")]
    if given("qformats") and not isinstance(target, str):
        raise click.UsageError("--qformat is for checkpoints, of which engines are built; give one as TARGET")
    built = _take_build(options)
    _refuse_build_options(target, *(draft for draft in drafts if draft not in get_args(DraftKind)))
    return target, drafts, built


def _take_build(options: dict[str, Any]) -> BuildOptions:
    return BuildOptions(**{name: options.pop(name) for name in _BUILD if name in options})


def _refuse_build_options(*models: str | Path | None) -> None:
    """Raise click's UsageError where options say how to build, and none of the models is a checkpoint."""
    if not any(isinstance(model, str) for model in models) and (names := given(*_BUILD)):
        raise click.UsageError(f"--{names[0]} is for checkpoints, of which engines are built; give one as TARGET")


def _read(model: str, name: str) -> str | Path:
    """A checkpoint as it is named, or the path of an engine."""
    path = Path(model).expanduser()
    if is_checkpoint(model):
        return model
    if not path.is_dir():
        raise EngineDirError(
            f"{model}: no such directory; {name} wants a checkpoint's directory, its Hub ID (owner/name), or an engine "
            "directory"
        )
    return path


def build_models(options: dict[str, Any], built: BuildOptions, *, for_chat: bool = False) -> str:
    """Replace the checkpoints in ``options`` by their engines, which are built where the cache lacks them.

    for_chat: check before a build that prompts can be put into a chat template. Returns the target's name for people.
    Raises SpecError.
    """
    target, draft = options["engine_dir"], options["draft_engine_dir"]
    is_hub_id = isinstance(target, str) and not Path(target).expanduser().is_dir()
    name = target if is_hub_id else Path(target).expanduser().resolve().name
    template = options.get("chat_template")
    options["engine_dir"], options["draft_engine_dir"] = engines_of(
        target,
        draft,
        built,
        for_chat=for_chat,
        chat_template=template,
        check=options.get("check", "quick"),
        meanwhile=_load_decoder,
    )
    return name


def _load_decoder() -> None:
    """What opens the engines, loaded while another process looks for them."""
    import specrun.decoder  # noqa: F401
