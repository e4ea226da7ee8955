"""Reads and checks the fields of an untrusted JSON object. Errors name the field."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from specrun import arguments
from specrun.errors import RequestError

_T = TypeVar("_T")


def wrong(name: str, value: object, expected: str, param: str | None = None) -> RequestError:
    """The error of a field that is not what is ``expected``. param: the field, where ``name`` is a part of it."""
    return RequestError(f"{name} {arguments.show(value)}: expected {expected}", param or name)


def as_object(name: str, value: Any) -> Mapping[str, Any]:
    """A JSON object. Raises RequestError."""
    if not isinstance(value, Mapping):
        raise wrong(name, value, "an object")
    return value


class Fields:
    """The fields of a JSON object that are not null. ``unread`` has those that were not read yet."""

    def __init__(self, body: Mapping[str, Any], prefix: str = "") -> None:
        """prefix: text before the fields' names in errors."""
        self.unread: dict[str, Any] = {name: value for name, value in body.items() if value is not None}
        self._prefix = prefix

    def __bool__(self) -> bool:
        return bool(self.unread)

    def take(self, name: str, check: Callable[[str, Any], _T]) -> _T | None:
        """Read a field, checked and converted by ``check``; None where it is missing.

        Raises RequestError, with the field's name.
        """
        if name not in self.unread:
            return None
        full = self._prefix + name
        value = self.unread.pop(name)
        try:
            return check(full, value)
        except RequestError as error:
            error.param = error.param or full
            raise

    def pop(self, name: str) -> Any:
        """Read a field without a check; None where it is missing."""
        return self.unread.pop(name, None)

    def required(self, name: str, check: Callable[[str, Any], _T]) -> _T:
        """Read a field as ``take`` does. Raises RequestError too where it is missing."""
        value = self.take(name, check)
        if value is None:
            raise RequestError(f"{name}: missing", name)
        return value

    def whole(self, name: str, low: int, high: int | None = None) -> int | None:
        """Read a whole number in a range; None where it is missing."""
        limit = arguments.at_least(low) if high is None else arguments.between(low, high)
        return self.take(name, lambda name, value: limit.check(name, arguments.whole(name, value)))

    def refuse(self, unsupported: Mapping[str, Sequence[Any]]) -> None:
        """Raise RequestError for fields that are not supported, unless they have one of the values without effect."""
        for name, no_effect in unsupported.items():
            value = self.unread.pop(name, None)
            if value is not None and not any(type(value) is type(other) and value == other for other in no_effect):
                raise RequestError(f"{name}: not supported; leave it out", name)
