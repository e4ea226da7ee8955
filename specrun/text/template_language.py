"""The language of chat templates: jinja2's, as transformers extends it, in a sandbox.

A template is an untrusted program. It reaches nothing but its data, and the length of what it writes is limited.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from typing_extensions import override

MOST_CHARACTERS = 1 << 24
"""The most characters that a template writes, and items or digits of a product or a power."""


class Environment(ImmutableSandboxedEnvironment):
    """The sandbox, in which single operations end soon: ``limited_time`` looks at the clock between lines."""

    intercepted_binops = frozenset({"*", "**"})

    @override
    def concat(self, parts: Iterable[str]) -> str:
        """Join what the template, a macro or a block writes. Raises ValueError where that is too long."""
        kept, length = [], 0
        for part in parts:
            length += len(part)
            if length > MOST_CHARACTERS:
                raise ValueError(f"it writes more than {MOST_CHARACTERS} characters")
            kept.append(part)
        return "".join(kept)

    @override
    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """The product or power. Raises ValueError where it would be long."""
        if _size(operator, left, right) > MOST_CHARACTERS:
            raise ValueError(f"it makes something of more than {MOST_CHARACTERS} characters")
        return super().call_binop(context, operator, left, right)


def _size(operator: str, left: Any, right: Any) -> int:
    """How long a product or a power is."""
    for sequence, count in ((left, right), (right, left)):
        if operator == "*" and isinstance(count, int) and isinstance(sequence, str | list | tuple):
            return len(sequence) * count
    if isinstance(left, int) and isinstance(right, int):
        return left.bit_length() + right.bit_length() if operator == "*" else left.bit_length() * right
    return 0


class _Generation(Extension):
    """``{% generation %} .. {% endgeneration %}`` marks the model's part of a text, for training. Here: its body."""

    tags = {"generation"}  # noqa: RUF012

    @override
    def parse(self, parser: Parser) -> nodes.Node:
        """The tag as a call with its body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return caller()


class _Namespace(Namespace):
    """jinja2's ``namespace`` without names that begin with an underscore, which lead to Python's own attributes."""

    def __init__(*args: Any, **values: Any) -> None:
        self, *rest = args
        attributes = dict(*rest, **values)
        for name in attributes:
            _require_public(name)
        Namespace.__init__(self, attributes)

    @override
    def __setitem__(self, name: str, value: Any) -> None:
        _require_public(name)
        super().__setitem__(name, value)


def _require_public(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace takes no name like {name!r}")


class _Dict:
    """``dict`` for templates: not the type itself, whose attributes lead to Python's own."""

    def __call__(self, *args: Any, **values: Any) -> dict[Any, Any]:
        return dict(*args, **values)

    def fromkeys(self, keys: Iterable[Any], value: Any = None) -> dict[Any, Any]:
        """A dict of ``keys`` that all have the same value."""
        return dict.fromkeys(keys, value)


def make_environment() -> Environment:
    """jinja2 with the settings, filters and functions that transformers gives to chat templates."""
    environment = Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        optimized=False,  # Nothing runs while it is compiled.
        extensions=[_Generation, loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    del environment.globals["lipsum"]  # Writes as much as it is told to.
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "namespace": _Namespace,
        "dict": _Dict(),
    }
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The filter ``tojson``, without jinja2's escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(format: str) -> str:
    """The function by which templates tell the date."""
    return datetime.now().strftime(format)


def _raise_exception(message: str) -> NoReturn:
    """The function by which templates refuse a conversation."""
    raise jinja2.exceptions.TemplateError(message)
