"""Options that several commands have."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from typing_extensions import override

from specrun.command_line import FolderPath
from specrun.config import parse_device_list, parse_draft_len, parse_hosts, parse_logit_bias

if TYPE_CHECKING:
    from specrun.sampling.sampler import SamplingParams

Decorator = Callable[[Any], Any]


def together(*options: Decorator) -> Decorator:
    """One decorator that adds ``options`` to a command, in this order."""
    return lambda command: reduce(lambda decorated, option: option(decorated), reversed(options), command)


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


DEVICES = Parsed("list", parse_device_list)
DRAFT_LEN = Parsed("length", parse_draft_len)


_NUMBERS: dict[str, tuple[int | float, str]] = {
    "temperature": (0.0, "0: greedy."),
    "top_k": (0, "0: off."),
    "top_p": (1.0, "1: off."),
    "min_p": (0.0, "0: off."),
    "repetition_penalty": (1.0, "Penalty of every token of prompt and output; 1: off."),
    "presence_penalty": (0.0, "Penalty of every token of the output; 0: off."),
    "frequency_penalty": (0.0, "Penalty of every token, times its count in the output; 0: off."),
}
SAMPLING = (*_NUMBERS, "logit_bias")
"""Names of the options of ``SamplingParams`` but for the seed."""


def sampling_options(temperature: float = 0.0) -> Decorator:
    """The options of SAMPLING. temperature: its default."""
    defaults = {name: default for name, (default, _) in _NUMBERS.items()} | {"temperature": temperature}
    numbers = [
        click.option(f"--{name}", type=type(default), default=default, show_default=True, help=_NUMBERS[name][1])
        for name, default in defaults.items()
    ]
    kind, meaning = Parsed("list", parse_logit_bias), "Numbers to add to these tokens' logits; -inf forbids a token."
    return together(*numbers, click.option("--logit_bias", type=kind, default="", metavar="ID:BIAS,..", help=meaning))


def sampling_params(options: dict[str, Any]) -> SamplingParams:
    """What ``sampling_options`` and ``seed_option`` say. A seed that was not given and counts is shown."""
    from specrun.sampling.sampler import SamplingParams

    note_unused_sampling(options)
    params = SamplingParams(seed=options["seed"], **{name: options[name] for name in SAMPLING})
    if params.seed is None:
        params = params.seeded()
        if not params.greedy:
            click.echo(f"seed {params.seed}", err=True)
    return params


def given_sampling(options: dict[str, Any]) -> dict[str, Any]:
    """What was given of ``sampling_options`` and ``seed_option``."""
    return {name: options[name] for name in given(*SAMPLING, "seed")}


def given(*names: str) -> list[str]:
    """Those of the running command's options ``names`` that stand on its command line."""
    source = click.get_current_context().get_parameter_source
    return [name for name in names if source(name) is ParameterSource.COMMANDLINE]


def note_unused_sampling(options: dict[str, Any]) -> None:
    """Say which of the given options do nothing, because texts are greedy, or because they are drawn."""
    if options["temperature"] != 0:
        if given("draft_confidence"):
            click.echo("note: --draft_confidence changes nothing: only greedy texts end drafts by confidence", err=True)
    elif names := given("top_k", "top_p", "min_p", "seed", "acceptance"):
        wanted = " and ".join(f"--{name}" for name in names)
        click.echo(f"note: temperature 0 is greedy: {wanted} changes nothing; give --temperature too", err=True)


tokenizer_dir_option = click.option("--tokenizer_dir", type=FolderPath, help="Default: the target's tokenizer.")
draft_option = click.option(
    "--draft",
    type=click.Choice(["suffix", "ngram"]),
    help="suffix: draft what followed the last tokens where they came before in the text or in earlier outputs, beside "
    "a draft engine or without one. ngram: another name of it.",
)
rank_hosts_option = click.option(
    "--rank_hosts",
    type=Parsed("list", parse_hosts),
    metavar="HOST,HOST,..",
    help="The machine of each rank of a CPU target, this one first. Default: this one.",
)
bit_exact_option = click.option(
    "--bit_exact", is_flag=True, help="An error where texts are not the target's own to the byte."
)


constraint_options = together(
    click.option("--json_schema", type=FolderPath, metavar="FILE", help="The output is JSON of this schema."),
    click.option("--json_object", is_flag=True, help="The output is a JSON object."),
    click.option("--regex", metavar="TEXT", help="The output matches this regular expression."),
    click.option("--choice", multiple=True, metavar="TEXT", help="The output is one of these texts."),
    click.option("--grammar", type=FolderPath, metavar="FILE", help="The output follows this Lark grammar."),
)
CONSTRAINTS = ("json_schema", "json_object", "regex", "choice", "grammar")
"""Names of ``constraint_options``."""


def constraints(options: dict[str, Any]) -> dict[str, Any]:
    """What ``constraint_options`` say, as ``RequestOptions`` takes it. Raises RequestError for unreadable files."""
    from specrun.request.prompts import read_text

    constraints_given = {name: options[name] for name in CONSTRAINTS}
    for name in ("json_schema", "grammar"):
        if constraints_given[name] is not None:
            constraints_given[name] = read_text(f"--{name}", constraints_given[name])
    return constraints_given


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


def with_recommended_sampling(options: dict[str, Any]) -> dict[str, Any]:
    """``options`` with the target's own sampling where none was given; what is used of it is shown."""
    from specrun.request.generation_config import recommended_sampling

    if options["generation_config"] == "none":
        return options
    given = given_sampling(options)
    recommended = {
        name: value for name, value in recommended_sampling(options["engine_dir"]).items() if name not in given
    }
    if ({**options, **recommended})["temperature"] == 0:  # Of greedy texts the others change nothing.
        recommended = {
            name: value for name, value in recommended.items() if name in ("temperature", "repetition_penalty")
        }
    show_recommended_sampling(recommended)
    return {**options, **recommended}


def show_recommended_sampling(recommended: dict[str, Any]) -> None:
    """Say what of generation_config.json is used."""
    if recommended:
        values = ", ".join(f"{name} {value}" for name, value in recommended.items())
        click.echo(f"sampling of generation_config.json: {values}", err=True)


seed_option = click.option("--seed", type=int, help="The same seed gives the same text. Default: a new one, shown.")


def use_color(wanted: bool | None) -> bool:
    """Colour on a terminal unless told otherwise (https://no-color.org)."""
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ if wanted is None else wanted


def require_one_source(input_text: tuple[str, ...], input_file: Path | None) -> None:
    """Prompts come from one place. Raises click's UsageError."""
    if input_text and input_file:
        raise click.UsageError("--input_text cannot be combined with --input_file")
