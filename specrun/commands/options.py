"""Options that several commands have."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource
from typing_extensions import override

from specrun.command_line import FolderPath
from specrun.config import DraftTargetConfig, parse_hosts, parse_logit_bias
from specrun.field_options import Decorator, field_option, packed, together
from specrun.request.generation_config import recommended_sampling
from specrun.request.options import RequestOptions
from specrun.request.prompts import read_text
from specrun.sampling.sampler import SamplingParams


class Parsed(click.ParamType[Any]):
    """An option whose text a function reads; its ValueError becomes a usage error."""

    def __init__(self, name: str, parse: Callable[[str], Any]) -> None:
        self.name = name
        self._parse = parse

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Parse ``value`` unless a default already is."""
        if not isinstance(value, str):
            return value
        try:
            return self._parse(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


class TextFile(click.ParamType[Any]):
    """An option that names a file and means its text. Raises RequestError for unreadable files."""

    name = "file"

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Read the file."""
        return read_text(param.opts[0] if param else "file", Path(value))


SAMPLING = tuple(field.name for field in fields(SamplingParams) if field.name != "seed")
"""Names of the options of ``SamplingParams`` but for the seed."""
_DRAWN = ("top_k", "top_p", "min_p", "top_n_sigma", "typical_p", "xtc_probability", "xtc_threshold")
"""Those that change nothing of greedy texts."""


def sampling_options(temperature: float = 0.0, seed: int | None = None) -> Decorator:
    """The options of ``SamplingParams``, which the command gets as ``params``. temperature, seed: their defaults."""
    defaults: dict[str, Any] = {"temperature": {"default": temperature}}
    bias = {"type": Parsed("list", parse_logit_bias), "default": "", "metavar": "ID:BIAS,.."}
    numbered = {} if seed is None else {"default": seed, "show_default": True, "help": "Seed of the draws."}
    defaults["dry_sequence_breakers"] = {"show_default": r"\n : \" *", "metavar": "TEXT"}
    return together(
        packed("params", SamplingParams),
        *(field_option(SamplingParams, name, **defaults.get(name, {})) for name in SAMPLING[:-1]),
        field_option(SamplingParams, "logit_bias", **bias),
        field_option(SamplingParams, "seed", **numbered),
    )


def shown_seed(params: SamplingParams) -> SamplingParams:
    """``params`` with a seed. One that was not given and counts is shown, and so are options that do nothing."""
    note_unused_sampling(params)
    if params.seed is None:
        params = params.seeded()
        if not params.greedy:
            click.echo(f"seed {params.seed}", err=True)
    return params


def given_sampling(params: SamplingParams) -> dict[str, Any]:
    """What of ``params`` stands on the command line or in the file of ``--config``."""
    names = given(*SAMPLING, "seed", sources=(ParameterSource.COMMANDLINE, ParameterSource.DEFAULT_MAP))
    return {name: getattr(params, name) for name in names}


def given(*names: str, sources: Sequence[ParameterSource] = (ParameterSource.COMMANDLINE,)) -> dict[str, str]:
    """Those of the running command's parameters ``names`` that stand in one of ``sources``, with their flags."""
    context = click.get_current_context()
    return {
        name: param.opts[0]
        for name in names
        for param in context.command.params
        if param.name == name and context.get_parameter_source(name) in sources
    }


def first_given(*names: str) -> str | None:
    """The flag of the first of the parameters ``names`` that stands on the command line."""
    return next(iter(given(*names).values()), None)


def note_unused_sampling(params: SamplingParams) -> None:
    """Say which of the given options do nothing, because texts are greedy, or because they are drawn."""
    if not params.greedy:
        if given("draft_confidence"):
            click.echo("note: --draft_confidence changes nothing: only greedy texts end drafts by confidence", err=True)
    elif flags := given(*_DRAWN, "seed", "use_logits").values():
        click.echo(
            f"note: temperature 0 is greedy: {' and '.join(flags)} changes nothing; give --temperature too", err=True
        )


tokenizer_dir_option = click.option("--tokenizer_dir", type=FolderPath, help="Default: the target's tokenizer.")
draft_option = field_option(DraftTargetConfig, "draft")
rank_hosts_option = field_option(
    DraftTargetConfig,
    "rank_hosts",
    type=Parsed("list", parse_hosts),
    multiple=False,
    default=(),
    metavar="HOST,HOST,..",
)
acceptance_option = field_option(
    RequestOptions,
    "acceptance",
    "--acceptance",
    "use_logits",
    default="tokens",
    show_default=True,
    callback=lambda _context, _option, value: value == "logits",
)
"""``use_logits`` of ``DraftTargetConfig``."""

_FILE = {"type": TextFile(), "metavar": "FILE"}
constraint_options = together(
    field_option(RequestOptions, "json_schema", **_FILE),
    field_option(RequestOptions, "json_object"),
    field_option(RequestOptions, "regex", metavar="TEXT"),
    field_option(RequestOptions, "choice", metavar="TEXT"),
    field_option(RequestOptions, "grammar", **_FILE),
)
request_options = packed("options", RequestOptions)
"""The command gets the options of ``RequestOptions`` below this as ``options``."""

prompt_options = together(
    click.option("--input_text", "-p", multiple=True, help="A prompt; may be given several times."),
    click.option("--input_file", type=FolderPath, help="A file of prompts, one a line. Default: standard input."),
)


generation_config_option = click.option(
    "--generation_config",
    type=click.Choice(["auto", "none"]),
    default="auto",
    show_default=True,
    help="auto: sample as the target's generation_config.json recommends, unless options say otherwise.",
)


def with_recommended_sampling(params: SamplingParams, target: Path) -> SamplingParams:
    """``params`` with the target's own sampling where none was given; what is used of it is shown."""
    chosen = given_sampling(params)
    recommended = {name: value for name, value in recommended_sampling(target).items() if name not in chosen}
    result = replace(params, **recommended)
    if result.greedy:  # Of greedy texts the others change nothing.
        recommended = {
            name: value for name, value in recommended.items() if name in ("temperature", "repetition_penalty")
        }
        result = replace(params, **recommended)
    show_recommended_sampling(recommended)
    return result


def show_recommended_sampling(recommended: Mapping[str, Any]) -> None:
    """Say what of generation_config.json is used."""
    if recommended:
        values = ", ".join(f"{name} {value}" for name, value in recommended.items())
        click.echo(f"sampling of generation_config.json: {values}", err=True)


def use_color(wanted: bool | None) -> bool:
    """Colour on a terminal unless told otherwise (https://no-color.org)."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ if wanted is None else wanted


def require_one_source(input_text: tuple[str, ...], input_file: Path | None) -> None:
    """Prompts come from one place. Raises click's UsageError."""
    if input_text and input_file:
        raise click.UsageError("--input_text cannot be combined with --input_file")
