"""The types of what callers pass: JSON and numpy write whole numbers in several ways, and mistakes get one message."""

from __future__ import annotations

import dataclasses
import difflib
import operator
import os
from collections.abc import Iterable, Sequence
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrun.errors import RequestError

_LONGEST_SHOWN = 60
"""Characters of a wrong value that a message shows."""


class Named:
    """Base of dataclasses of options. Raises RequestError, with the nearest name, for an option that does not exist."""

    if not TYPE_CHECKING:  # Type checkers and editors read the dataclass.

        def __new__(cls, *_, **given):  # noqa: D102
            require_names(given, [field.name for field in dataclasses.fields(cls)])
            return super().__new__(cls)


def require_names(given: Iterable[str], known: Sequence[str]) -> None:
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


def optional_whole(name: str, value: Any) -> int | None:
    """A whole number or None. Raises RequestError, naming the argument."""
    return None if value is None else whole(name, value)


def number(name: str, value: Any) -> float:
    """A number. Raises RequestError, naming the argument."""
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            pass
    raise RequestError(f"{name} {show(value)}: expected a number")


def flag(name: str, value: Any) -> bool:
    """True or False. Raises RequestError, naming the argument."""
    if isinstance(value, bool):
        return value
    raise RequestError(f"{name} {show(value)}: expected True or False")


def text(name: str, value: Any) -> str:
    """A text. Raises RequestError, naming the argument."""
    if isinstance(value, str):
        return value
    raise RequestError(f"{name} {show(value)}: expected a text")


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
        found = [operator.index(item) for item in items]  # Prompts are long, and nearly always what they should be.
    except TypeError:
        found = [whole(name, item) for item in items]
    for worst in (min(found, default=0), max(found, default=0)):
        if not -(2**63) <= worst < 2**63:
            raise RequestError(f"{name} {show(worst)}: expected numbers of 64 bits")
    return found


def _items(name: str, value: Any, expected: str) -> Sequence[Any]:
    if isinstance(value, str | bytes):
        raise RequestError(f"{name} {show(value)}: expected {expected}")
    try:
        return list(value)
    except TypeError as error:
        raise RequestError(f"{name} {show(value)}: expected {expected}") from error
