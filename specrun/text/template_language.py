"""The language of chat templates: jinja2's, as transformers extends it, in a sandbox with limits.

A template is a stranger's program. It reaches nothing but its data, and what it makes is limited: each text and list,
and all of them together. What an operation will make is estimated before it is done.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from typing_extensions import override

MOST_CHARACTERS = 1 << 24
"""The most characters of one text that a template makes, and of its output. An item of a list counts as eight."""
MOST_IN_ALL = 1 << 27
"""The most characters of all that it makes for one conversation."""
_ITEM = 8
_WIDTH = re.compile(r"%[-+ #0_^]*(\d+|\*)|\.(\d+|\*)|:[^{}]*?(\d+)")
"""Widths and precisions in a text that says how others are written."""


def size_of(value: Any) -> int:
    """How many characters ``value`` has when it is written; where more than MOST_CHARACTERS, some number above that."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, int):
        return value.bit_length() // 3
    if isinstance(value, Mapping):
        items: Iterable[Any] = (part for pair in value.items() for part in pair)
    elif isinstance(value, list | tuple | set | frozenset):
        items = value
    else:
        return _ITEM
    size = 0
    for item in items:
        size += _ITEM + size_of(item)
        if size > MOST_CHARACTERS:
            break
    return size


def _growth(name: str, text: Any, arguments: tuple[Any, ...], named: Mapping[str, Any]) -> int:
    """At most how many characters a filter or a method of texts, called ``name``, makes of ``text``."""
    given = (*arguments, *named.values())
    size, others = size_of(text), size_of(given)
    if name == "join":
        return size + others * (size // _ITEM + 1) if not isinstance(text, str) else others * (size + 1)
    if name == "replace" and isinstance(text, str) and len(given) > 1:
        old, new = (each if isinstance(each, str) else "" for each in given[:2])
        return size + text.count(old) * len(new)
    if name in ("format", "format_map", "%"):
        return _formatted(str(text), given)
    numbers = [len(each) if isinstance(each, str) else abs(each) for each in given if isinstance(each, int | str)]
    if name == "tojson":
        numbers.append(_ITEM)  # Of a character that is not ASCII.
    growing = others if name in _MULTIPLY else 1
    return size * max(1, growing) + others + max(1, size if name in _BY_PART else 1) * max(numbers, default=0)


_MULTIPLY = {"translate", "wordwrap", "xmlattr"}
"""Filters and methods that may write an argument many times."""
_BY_PART = {"indent", "tojson", "expandtabs", "batch", "slice"}
"""Filters and methods that may many times write as many characters as an argument says."""
_GROWS = {"center", "ljust", "rjust", "zfill", "join", "replace", "format", "format_map", *_MULTIPLY, *_BY_PART}
"""Filters and methods of texts whose result may be longer than what they are given."""
_WRITTEN = {"string", "pprint", "urlize", "e", "escape", "forceescape", "urlencode", "sum"}
"""Filters that write all of what they are given, each part as often as it stands there."""


def _formatted(text: str, given: Any) -> int:
    """At most how many characters ``text`` has with ``given`` in its places."""
    widths = [part for groups in _WIDTH.findall(text) for part in groups if part]
    numbers = [int(width[:20]) for width in widths if width != "*"]
    from_arguments = "*" in widths or re.search(r"\{[^{}]*\{", text)
    if from_arguments:
        numbers += [abs(each) for each in _numbers(given)]
    places = text.count("{") + text.count("%")
    return len(text) + places * (size_of(given) + max(numbers, default=0))


def _numbers(value: Any) -> Iterator[int]:
    if isinstance(value, int):
        yield value
    elif isinstance(value, Mapping):
        yield from _numbers(list(value.values()))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _numbers(item)


def require_short(size: int) -> None:
    """Raise ValueError for what would be longer than a template may make."""
    if size > MOST_CHARACTERS:
        raise ValueError(f"it makes something of more than {MOST_CHARACTERS} characters")


class _Code(CodeGenerator):
    """jinja2's compiler, which leaves these two to Python, without the environment."""

    @override
    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        """``a ~ b``."""
        self.write("environment.join_values((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")

    @override
    def visit_Getitem(self, node: nodes.Getitem, frame: Frame) -> None:
        """``a[b]``, which for slices makes a copy."""
        is_slice = isinstance(node.arg, nodes.Slice)
        self.write("environment.spend(" if is_slice else "")
        super().visit_Getitem(node, frame)
        self.write(")" if is_slice else "")


class Environment(ImmutableSandboxedEnvironment):
    """The sandbox, in which nothing is repeated without limit either."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})
    code_generator_class = _Code

    def __init__(self, **settings: Any) -> None:
        self._rendering = threading.local()
        super().__init__(**settings, finalize=self._written)
        self.filters = {name: self.limited(name, function) for name, function in self.filters.items()}

    @contextmanager
    def rendering(self) -> Iterator[None]:
        """A block in which this thread renders one conversation."""
        self._rendering.left = MOST_IN_ALL
        try:
            yield
        finally:
            del self._rendering.left

    def spend(self, value: Any) -> Any:
        """``value``, which was made just now. Raises ValueError where that makes too much in all."""
        left = getattr(self._rendering, "left", MOST_IN_ALL)
        size = len(value) * (1 if isinstance(value, str) else _ITEM) if hasattr(value, "__len__") else _ITEM
        self._rendering.left = left - size
        if size > left:
            raise ValueError(f"it makes more than {MOST_IN_ALL} characters in all")
        return value

    @override
    def concat(self, parts: Iterable[str]) -> str:
        """Join what the template, a macro or a block writes. Raises ValueError where that is too long."""
        kept, length = [], 0
        for part in parts:
            length += len(part)
            if length > MOST_CHARACTERS:
                raise ValueError(f"it writes more than {MOST_CHARACTERS} characters")
            kept.append(part)
        text: str = self.spend("".join(kept))
        return text

    def join_values(self, values: tuple[Any, ...]) -> str:
        """``a ~ b``. Raises ValueError where it would be long."""
        require_short(size_of(values))
        text: str = self.spend("".join(map(str, values)))
        return text

    @override
    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """The sum, product, power or remainder. Raises ValueError where it would be long."""
        if operator == "+" and not isinstance(left, int | float):
            require_short(size_of(left) + size_of(right))
        elif operator == "%" and isinstance(left, str):
            require_short(_growth("%", left, right if isinstance(right, tuple) else (right,), {}))
        elif operator in ("*", "**"):
            require_short(_product(operator, left, right))
        return self.spend(super().call_binop(context, operator, left, right))

    @override
    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """A call of a function or method. Raises ValueError where it would make something long."""
        name, text = getattr(__obj, "__name__", ""), getattr(__obj, "__self__", None)
        if name in ("format", "format_map"):  # The sandbox has wrapped them.
            text = getattr(getattr(__obj, "__wrapped__", None), "__self__", text)
        if isinstance(text, str) and name in _GROWS:
            args = tuple(__self._read(value) for value in args)
            require_short(_growth(name, text, args, kwargs))
        return __self.spend(super().call(__context, __obj, *args, **kwargs))

    def limited(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter that makes nothing long."""

        def limited(*args: Any, **kwargs: Any) -> Any:
            if name in ("join", "sum"):
                args = tuple(self._read(value) for value in args)
            value, *rest = args[1:] if passes else args
            if name in _GROWS:
                require_short(_growth(name, value, tuple(rest), kwargs))
            elif name in _WRITTEN:
                require_short(8 * size_of(value))  # The longest escape has seven characters.
            return self.spend(function(*args, **kwargs))

        passes = getattr(function, "jinja_pass_arg", None)
        if passes:
            limited.jinja_pass_arg = passes  # type: ignore[attr-defined]
        return limited

    def _read(self, value: Any) -> Any:
        """What an iterator gives, whose size can be told then."""
        return self.spend(list(value)) if isinstance(value, Iterator) else value

    def _written(self, value: Any) -> Any:
        """What ``{{ value }}`` writes."""
        if not isinstance(value, str):
            require_short(size_of(value))
        return value


def _product(operator: str, left: Any, right: Any) -> int:
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
    environment.filters["tojson"] = environment.limited("tojson", _to_json)
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
    require_short(_formatted(format, ()))
    return datetime.now().strftime(format)


def _raise_exception(message: str) -> NoReturn:
    """The function by which templates refuse a conversation."""
    raise jinja2.exceptions.TemplateError(message)
