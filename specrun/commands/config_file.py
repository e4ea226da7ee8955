"""``--config``: a YAML file with options of commands, in place of their defaults."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from specrun.command_line import FolderPath
from specrun.errors import RequestError

_NOT_IN_FILES = ("config", "help")


def _use(context: click.Context, _option: click.Parameter, file: Path | None) -> None:
    """Make what the file says the defaults of the running command. Raises RequestError."""
    if file is None:
        return
    from specrun.yaml_file import read_settings

    settings = read_settings(file, RequestError, "tuned.yaml of specrun tune")
    root = context.find_root().command
    commands = root.commands.values() if isinstance(root, click.Group) else [context.command]
    known = {name for command in commands for name, _ in option_names(command)}
    for key in settings:
        if key not in known:
            close = difflib.get_close_matches(str(key), sorted(known), n=1, cutoff=0.0)[0]
            raise RequestError(f"{file}: no command has an option {key!r}; did you mean {close!r}?")
    options = dict(option_names(context.command))  # Options of other commands are theirs.
    context.default_map = {
        str(options[key].name): option_value(options[key], value)
        for key, value in settings.items()
        if key in options and value is not None
    }


def option_names(command: click.Command) -> Iterator[tuple[str, click.Parameter]]:
    """How a file names a command's options and arguments: as on the command line, and target and draft_model."""
    for param in command.params:
        name = param.opts[0].lstrip("-")
        if name not in _NOT_IN_FILES:
            yield name, param


def option_value(param: click.Parameter, value: Any) -> Any:
    """A value as the command line would have it: options read texts."""
    if isinstance(value, bool):
        return value
    if param.multiple or param.nargs != 1:
        return [str(item) for item in (value if isinstance(value, list) else [value])]
    return str(value)


config_option = click.option(
    "--config",
    type=FolderPath,
    is_eager=True,
    expose_value=False,
    callback=_use,
    metavar="FILE.yaml",
    help="Take options from this file, as specrun tune writes it. Those on the command line come first.",
)
