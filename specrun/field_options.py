"""Options of commands that are fields of dataclasses: their types, ranges, defaults and help stand there alone."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import click
from typing_extensions import override

from specrun.arguments import Limit, split_union
from specrun.command_line import FolderPath

Decorator = Callable[[Any], Any]


def together(*options: Decorator) -> Decorator:
    """One decorator that adds ``options`` to a command, in this order."""
    return lambda command: functools.reduce(lambda decorated, option: option(decorated), reversed(options), command)


def packed(name: str, make: Callable[..., object]) -> Decorator:
    """The command gets ``name``: what ``make`` makes of the arguments that are called as its parameters are.

    It takes them away. What is packed by a decorator above may be one of them.
    """
    names = inspect.signature(make).parameters

    def decorate(command: Callable[..., object]) -> Callable[..., object]:
        @functools.wraps(command)
        def called(**arguments: Any) -> object:
            values = {name: arguments.pop(name) for name in names if name in arguments}
            return command(**{name: make(**values)}, **arguments)

        return called

    return decorate


def field_options(owner: type, *names: str) -> Decorator:
    """The options of several fields, see ``field_option``."""
    return together(*(field_option(owner, name) for name in names))


def field_option(owner: type, name: str, *flags: str, **settings: Any) -> Decorator:
    """The option of a field. Its help is the first paragraph of the docstring below the field.

    flags: the option's names, as click takes them; none: the field's name. settings: what click is told besides, or in
    place of what the field says.
    """
    declared = _type_of(get_type_hints(owner, include_extras=True)[name])
    if (default := getattr(owner, name, ())) not in ((), None):
        declared |= {"default": default, "show_default": default is not False}
    sentence = docstrings(owner).get(name, "").partition("\n\n")[0].replace("``", "")
    declared |= settings
    if declared.get("multiple"):
        sentence = f"{sentence[:-1]}; may be repeated."
    declared.setdefault("help", sentence)
    usual = f"--{name}/--no_{name}" if declared.get("default") is True else f"--{name}"
    return click.option(*(flags or [usual]), **declared)


def _type_of(hint: Any) -> dict[str, Any]:
    """What click is told of a type."""
    limit = None
    if get_origin(hint) is Annotated:
        hint, limit = get_args(hint)
    kinds, words = split_union(hint)
    if not kinds:
        return {"type": click.Choice(words)}
    if several := [kind for kind in kinds if get_origin(kind) in (Sequence, tuple)]:
        return _type_of(get_args(several[0])[0]) | {"multiple": True}
    if Path in kinds:
        return {"type": FolderPath}
    if words:
        number = click.types.convert_type(_type_of(kinds[0])["type"])
        return {"type": _NumberOrWord(number, words), "metavar": f"{'|'.join(words)}|N"}
    if get_origin(kinds[0]) is Annotated:
        return _type_of(kinds[0])
    if isinstance(limit, Limit) and limit.least is not None:
        return {"type": (click.IntRange if kinds[0] is int else click.FloatRange)(limit.least, limit.most)}
    return {"type": kinds[0]} | ({"is_flag": True} if kinds[0] is bool else {})


class _NumberOrWord(click.ParamType[Any]):
    """A number, or one of a few words."""

    name = "number"

    def __init__(self, number: click.ParamType[Any], words: Sequence[str]) -> None:
        self._number = number
        self._words = words

    @override
    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read ``value`` unless it is a word."""
        if value in self._words:
            return value
        if not str(value).isdecimal():
            self.fail(f"{value!r} is neither {' nor '.join(self._words)} nor a number", param, ctx)
        return self._number.convert(value, param, ctx)


@functools.cache
def docstrings(owner: type) -> dict[str, str]:
    """The docstring below each field of ``owner``, by name. Empty where there are no sources."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(owner)))
    except (OSError, TypeError):  # Classes of Python itself have none.
        return {}
    inherited = {name: text for base in owner.__bases__ for name, text in docstrings(base).items()}
    return inherited | {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in itertools.pairwise(node for part in tree.body for node in ast.iter_child_nodes(part))
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }
