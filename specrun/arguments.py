"""What callers pass, checked by the declared types: JSON and numpy write whole numbers in several ways."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import operator
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from specrun.errors import RequestError

_LONGEST_SHOWN = 60
"""Characters of a wrong value that a message shows."""


_Check = Callable[[str, Any], Any]
"""Takes an argument's name and value. Returns the value, written in one way; raises RequestError."""
_T = TypeVar("_T")


class Limit(NamedTuple):
    """Which values of a type may be given. In ``Annotated`` it limits the field of a ``Checked`` dataclass."""

    expected: str
    """Description of valid values, for messages."""
    holds: Callable[[Any], bool]
    least: int | None = None
    """Smallest valid number, for the command line."""
    most: int | None = None
    """Largest valid number, likewise."""

    def check(self, name: str, value: _T) -> _T:
        """``value``. Raises RequestError, naming the argument, where it may not be given."""
        if not self.holds(value):
            raise RequestError(f"{name} {show(value)}: expected {self.expected}")
        return value


def at_least(least: int) -> Limit:
    """The limit of numbers from ``least`` on."""
    return Limit(f"{least} or more", lambda value: bool(value >= least), least)


def between(least: int, most: int) -> Limit:
    """The limit of numbers from ``least`` to ``most``."""
    return Limit(f"{least} to {most}", lambda value: bool(least <= value <= most), least, most)


class Checked:
    """Base of dataclasses that check what they are given, each field by its annotation.

    In ``Annotated``, a Limit adds to the check of the type, and a function (name, value) takes its place. Raises
    RequestError, with the field's name, for a wrong value, and with the nearest name for a field that does not exist.
    """

    if not TYPE_CHECKING:  # Type checkers and editors read the dataclass.

        def __new__(cls, *_, **given):  # noqa: D102
            require_names(given, _checks(cls))
            return super().__new__(cls)

    def __post_init__(self) -> None:
        """Check every field, and write its value in one way."""
        for name, check in _checks(type(self)).items():  # type: ignore[arg-type]  # Classes are hashable.
            try:
                object.__setattr__(self, name, check(name, getattr(self, name)))
            except RequestError as error:
                error.param = name
                raise


@functools.cache
def _checks(owner: type) -> dict[str, _Check]:
    """The checks of a dataclass's fields, by name."""
    hints = get_type_hints(owner, include_extras=True)
    return {field.name: _check_of(hints[field.name]) for field in dataclasses.fields(owner) if field.init}


def _check_of(hint: Any) -> _Check:
    """The check that an annotation declares."""
    origin, parts = get_origin(hint), get_args(hint)
    if hint in _CHECKS:
        return _CHECKS[hint]
    if origin is Annotated:
        kind, extra = parts
        if not isinstance(extra, Limit):
            return extra  # type: ignore[no-any-return]
        inner = _check_of(kind)
        return lambda name, value: extra.check(name, inner(name, value))
    if origin in (Union, UnionType):
        kinds, words = split_union(hint)
        check = _check_of(functools.reduce(operator.or_, kinds) if kinds else Literal[words])
        return lambda name, value: (
            value if value is None or (isinstance(value, str) and value in words) else check(name, value)
        )
    if origin is Literal:
        return Limit(" or ".join(parts), lambda value: isinstance(value, str) and value in parts).check
    return instance_of(hint, hint.__name__)


def split_union(hint: Any) -> tuple[list[Any], tuple[str, ...]]:
    """The types of an annotation such as ``int | Literal["auto"] | None`` but for None, and its words."""
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    words = tuple(word for part in parts if get_origin(part) is Literal for word in get_args(part))
    return [part for part in parts if part is not NoneType and get_origin(part) is not Literal], words


def require_names(given: Iterable[str], known: Collection[str]) -> None:
    """Raise RequestError, with the nearest of the ``known`` names, for a name that is not among them."""
    for name in given:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {nearest[0]}?" if nearest else f"expected one of {', '.join(known)}"
            raise RequestError(f"{name}: no such option; {hint}")


def show(value: object) -> str:
    """``value`` in a message: its beginning."""
    try:
        text = repr(value)
    except Exception as error:
        text = f"<{type(value).__name__}: {error!r}>"
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}.."


def whole(name: str, value: Any) -> int:
    """A whole number, however it is written: 2, 2.0, numpy's. Raises RequestError, naming the argument."""
    if not isinstance(value, bool):
        try:
            return operator.index(value)
        except TypeError:
            if isinstance(value, Real) and float(value).is_integer():  # numpy's floats are Real numbers too.
                return int(float(value))
    raise RequestError(f"{name} {show(value)}: expected a whole number")


def number(name: str, value: Any) -> float:
    """A number. Raises RequestError, naming the argument."""
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            pass
    raise RequestError(f"{name} {show(value)}: expected a number")


def instance_of(kind: type[_T], expected: str) -> Callable[[str, Any], _T]:
    """The check of a type whose values are written in one way only. expected: what messages call them."""
    return Limit(expected, lambda value: isinstance(value, kind)).check


flag = instance_of(bool, "True or False")
text = instance_of(str, "a text")
json_object: Callable[[str, Any], Mapping[str, Any]] = Limit(
    "an object", lambda value: isinstance(value, Mapping)
).check
"""Check for a value that JSON calls an object."""


def optional_text(name: str, value: Any) -> str | None:
    """A text or None. Raises RequestError, naming the argument."""
    return None if value is None else text(name, value)


def path(name: str, value: Any) -> Path:
    """A path, or a text that is one. Raises RequestError, naming the argument."""
    if isinstance(value, str | os.PathLike) and "\0" not in os.fspath(value):
        return Path(value)
    raise RequestError(f"{name} {show(value)}: expected a path")


def texts(name: str, value: Any) -> tuple[str, ...]:
    """One text or several. Raises RequestError, naming the argument."""
    if isinstance(value, str):
        return (value,)
    return tuple(text(name, item) for item in _items(name, value, "a text or several"))


def wholes(name: str, value: Any) -> list[int]:
    """Whole numbers. Raises RequestError, naming the argument."""
    items = _items(name, value, "whole numbers")
    try:
        integers = [operator.index(item) for item in items]  # Prompts are long, and nearly always what they should be.
    except TypeError:
        integers = [whole(name, item) for item in items]
    for worst in (min(integers, default=0), max(integers, default=0)):
        if not -(2**63) <= worst < 2**63:
            raise RequestError(f"{name} {show(worst)}: expected numbers of 64 bits")
    return integers


def _items(name: str, value: Any, expected: str) -> Sequence[Any]:
    if isinstance(value, str | bytes):
        raise RequestError(f"{name} {show(value)}: expected {expected}")
    try:
        return list(value)
    except TypeError as error:
        raise RequestError(f"{name} {show(value)}: expected {expected}") from error


_CHECKS: dict[Any, _Check] = {
    int: whole,
    float: number,
    bool: flag,
    str: text,
    str | Sequence[str]: texts,
    **dict.fromkeys((Sequence[int], tuple[int, ...]), lambda name, value: tuple(wholes(name, value))),
    frozenset[int]: lambda name, value: frozenset(wholes(name, value)),
    Mapping[str, Any]: json_object,
}
