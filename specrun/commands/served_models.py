"""The models that ``specrun serve`` serves: the one of its command line, or those of a file."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from specrun.commands.config_file import option_names, option_value
from specrun.commands.models import Engines
from specrun.commands.options import generation_config_option, show_recommended_sampling
from specrun.commands.pair import Pair, pair_options
from specrun.errors import RequestError, SpecError
from specrun.request.generation_config import recommended_sampling

if TYPE_CHECKING:
    from specrun.builder import OnStart
    from specrun.serve.model import LoadedModel, ModelSpec

T = TypeVar("T")
_ALIASES = "aliases"
_OF_THE_PROCESS = ("threads",)
"""Options that a model of a file cannot have."""


@click.command()
@pair_options
@generation_config_option
@click.option(
    "--tool_call_format",
    metavar="NAME",
    default="auto",
    show_default=True,
    help="How the model writes tool calls; auto: as its chat template says.",
)
@click.option(
    "--reasoning_parser",
    metavar="NAME",
    default="auto",
    show_default=True,
    help="How the model writes thoughts; auto: as its chat template says; none: they are part of the answer.",
)
@click.option("--max_queue", type=click.IntRange(1), default=256, show_default=True, help="Most requests that wait.")
@click.option("--request_timeout", type=float, metavar="SECONDS", help="Time limit of an answer; it ends as it is.")
def one_model(
    pair: Pair,
    generation_config: str,
    tool_call_format: str,
    reasoning_parser: str,
    max_queue: int,
    request_timeout: float | None,
) -> ModelSpec:
    """The options of one model, and what they describe. Not a command of its own."""
    from specrun.openai.body import DEFAULTS
    from specrun.serve.model import LoadedModel, ModelSpec
    from specrun.text import reasoning, tool_formats
    from specrun.text.reasoning import ReasoningChoice

    tool_format = _named("tool_call_format", tool_call_format, {"auto": None, **tool_formats.FORMATS})
    choices: dict[str, ReasoningChoice] = {"auto": "auto", "none": "none", **reasoning.FORMATS}
    reasoning_format = _named("reasoning_parser", reasoning_parser, choices)
    context = click.get_current_context()

    def build(started: OnStart) -> Engines:
        with context.scope(cleanup=False):  # In another thread there is none.
            return pair.engines(started=started)

    def load(started: OnStart) -> LoadedModel:
        with context.scope(cleanup=False):
            engines = pair.engines(started=started)
            recommended = recommended_sampling(engines.target) if generation_config == "auto" else {}
            decoder = pair.load(_absolute(engines), tool_format, reasoning_format)
            show_recommended_sampling(recommended)
        return LoadedModel(decoder, replace(DEFAULTS, **recommended))

    return ModelSpec(pair.models.name, load, build, max_queue=max_queue, timeout=request_timeout)


def _absolute(engines: Engines) -> Engines:
    """The same with whole paths, which errors to clients are known to hold and are freed of."""
    name, target, draft, tokenizer = engines
    return Engines(name, target.absolute(), draft and draft.absolute(), tokenizer and tokenizer.absolute())


def spec_of(context: click.Context, name: str | None) -> ModelSpec:
    """The model that the options of a running command describe. name: None: the target's."""
    assert one_model.callback
    options = {str(param.name): context.params[str(param.name)] for param in one_model.params if param.expose_value}
    with context.scope(cleanup=False):
        spec: ModelSpec = one_model.callback(**options)
    return replace(spec, name=name or spec.name)


def read_models(file: Path, context: click.Context) -> list[ModelSpec]:
    """The models of a file: names with their options. context: of the command. Raises RequestError."""
    from specrun.yaml_file import read_settings

    settings = read_settings(file, RequestError, "that of docs/serving.md", "--models")
    if not settings:
        raise RequestError(f"{file}: no model in it; write name: {{target: DIR}}")
    specs: list[ModelSpec] = []
    owners: dict[str, str] = {}
    for name, given in settings.items():
        where = f"{file}: {name}"
        if not isinstance(name, str) or not name:
            raise RequestError(f"{where}: expected a text as the model's name; put it in quotes")
        if not isinstance(given, Mapping):
            raise RequestError(f"{where}: expected the model's options, as target: DIR")
        specs.append(_read_model(where, name, {**given}, context))
        for other in (name, *specs[-1].aliases):
            if other in owners:
                raise RequestError(f"{where}: {other!r} is a name of {owners[other]!r} already; give another one")
            owners[other] = name
    return specs


def _read_model(where: str, name: str, given: dict[str, Any], context: click.Context) -> ModelSpec:
    aliases = given.pop(_ALIASES, None) or []
    if not isinstance(aliases, list) or not all(isinstance(alias, str) and alias for alias in aliases):
        raise RequestError(f"{where}: {_ALIASES}: expected a list of texts")
    params = {key: param for key, param in option_names(one_model) if key not in _OF_THE_PROCESS}
    for key in given:
        if key not in params:
            close = difflib.get_close_matches(str(key), sorted(params), n=1, cutoff=0.0)[0]
            raise RequestError(f"{where}: a model has no option {key!r}; did you mean {close!r}?")
    if "draft_model" in given and "target" not in given:  # It would be taken for it.
        raise RequestError(f"{where}: draft_model: needs target")
    try:
        words = _command_line(params, {key: value for key, value in given.items() if value is not None})
        context = one_model.make_context(name, words, context, default_map=context.default_map)
        spec = spec_of(context, name)
    except click.UsageError as error:
        raise RequestError(f"{where}: {error.format_message()}") from error
    except SpecError as error:
        raise RequestError(f"{where}: {error}") from error
    return replace(spec, aliases=tuple(aliases), settings=given)


def _command_line(params: Mapping[str, click.Parameter], given: Mapping[str, Any]) -> list[str]:
    """A model's options as a command has them, whose checks then hold. Raises click's UsageError."""
    words: list[str] = []
    named: list[str] = []
    for key, param in params.items():
        if key not in given:
            continue
        value = option_value(param, given[key])
        if isinstance(param, click.Argument):
            named.append(value)
        elif isinstance(param, click.Option) and param.is_flag:
            if not isinstance(value, bool):
                raise click.BadParameter(f"{value}: expected true or false", param=param)
            words += param.opts[:1] if value else param.secondary_opts[:1]
        else:
            words += [
                word for item in (value if isinstance(value, list) else [value]) for word in (param.opts[0], str(item))
            ]
    return [*words, "--", *named]


def _named(option: str, name: str, known: Mapping[str, T]) -> T:
    """What ``known`` has under a name. Raises click's UsageError."""
    if name not in known:
        raise click.BadParameter(f"{name}: expected one of {', '.join(known)}", param_hint=f"--{option}")
    return known[name]
