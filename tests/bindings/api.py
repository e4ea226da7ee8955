"""What a build of TensorRT's bindings offers, read from the docstrings that pybind11 writes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

_CONTAINER = re.compile(r"(\w+\.)*(list|sequence|iterable|iterator|tuple|set|dict|mapping)\[", re.IGNORECASE)
_UNNAMED = re.compile(r"arg\d+")
"""What pybind11 calls a parameter that its author gave no name; it cannot be given by name."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a signature."""

    name: str
    type: str
    optional: bool


@dataclass(frozen=True)
class Signature:
    """One overload. ``self`` is among its parameters."""

    parameters: tuple[Parameter, ...]
    returns: str

    @property
    def named(self) -> tuple[Parameter, ...]:
        """All but ``*args`` and ``**kwargs``."""
        return tuple(parameter for parameter in self.parameters if not parameter.name.startswith("*"))

    def takes_any(self, stars: str) -> bool:
        """stars: ``*`` for further positional arguments, ``**`` for further keywords."""
        return any(re.fullmatch(re.escape(stars) + r"\w+", parameter.name) for parameter in self.parameters)

    def by_keyword(self, name: str) -> bool:
        """Whether a parameter of this name can be given by it."""
        return not _UNNAMED.fullmatch(name) and any(parameter.name == name for parameter in self.named)


@dataclass(frozen=True)
class Member:
    """An attribute of a class, or of the module."""

    kind: str
    """``class``, ``method``, ``property`` or ``value``."""
    type: str = ""
    """Of a property or a value; the name of a class."""
    settable: str | None = None
    """The type that a property takes."""
    signatures: tuple[Signature, ...] = ()


class Api:
    """One build of the bindings. Classes go by their qualified names; the module itself is the class ``""``."""

    def __init__(self, module: str, version: str, classes: Mapping[str, Mapping[str, Any]]) -> None:
        self.module = module
        self.version = version
        self._classes = classes
        self._named: dict[str, list[str]] = {}

    def member(self, owner: str, name: str) -> Member | None:
        """The attribute ``name`` of the class ``owner``, or of a class that it inherits from."""
        for base in self.lineage(owner):
            if (found := self._members.get((base, name))) is not None:
                return found
        return None

    def lineage(self, owner: str) -> list[str]:
        """The class and those that it inherits from."""
        return [owner, *self._classes[owner]["bases"]] if owner in self._classes else []

    def methods(self, owner: str) -> dict[str, Member]:
        """The methods that a class has of its own, without Python's special ones."""
        own = {name: self._members[owner, name] for name in self._classes[owner]["members"]}
        return {name: member for name, member in own.items() if member.kind == "method" and not name.startswith("_")}

    def classes_in(self, annotation: str) -> list[str]:
        """The classes of the bindings that a type names. C++ names stand where a class was registered too late."""
        if annotation not in self._named:
            self._named[annotation] = self._find_classes(annotation)
        return self._named[annotation]

    def _find_classes(self, annotation: str) -> list[str]:
        found = []
        for word in re.findall(r"[\w.:]+", annotation):
            name = word.rpartition("::")[2]
            parts = name.split(".")
            options = [".".join(parts[start:]) for start in range(len(parts))]
            options += [name.removeprefix("I")] if "::" in word else []
            found += [option for option in options if option in self._classes and option][:1] or (
                [word] if "::" in word else []
            )
        return found

    @staticmethod
    def is_container(annotation: str) -> bool:
        """Whether a type holds others."""
        return _CONTAINER.match(annotation) is not None

    @cached_property
    def names(self) -> frozenset[str]:
        """The name of every attribute of any class."""
        return frozenset(name for _, name in self._members)

    @cached_property
    def _members(self) -> dict[tuple[str, str], Member]:
        return {
            (owner, name): _member(raw)
            for owner, described in self._classes.items()
            for name, raw in described["members"].items()
        }


def _member(raw: Mapping[str, Any]) -> Member:
    match raw["kind"]:
        case "method":
            return Member("method", signatures=signatures(raw["doc"] or ""))
        case "property":
            getters, setters = signatures(raw["get"] or ""), signatures(raw["set"] or "")
            settable = None if raw["set"] is None else (setters[0].parameters[-1].type if setters else "object")
            return Member("property", getters[0].returns if getters else "", settable)
        case kind:
            return Member(kind, raw["type"])


def signatures(docstring: str) -> tuple[Signature, ...]:
    """The overloads of a function that pybind11 made: its first line, or where there are several, a numbered list."""
    lines = docstring.strip().splitlines()
    if "Overloaded function." in lines[1:2]:
        lines = [line.partition(". ")[2] for line in lines if re.match(r"\d+\. \w+\(", line)]
    else:
        lines = lines[:1]
    return tuple(found for line in lines if (found := _signature(line)) is not None)


def _signature(line: str) -> Signature | None:
    """``name(self: X, a: int, b: str = None) -> Y``; None where the line is something else."""
    matched = re.fullmatch(r"\w*\((.*)\)(?: -> (.*))?", line.strip())
    if matched is None:
        return None
    parameters = []
    for text in _split(matched[1]):
        if text in ("*", "/"):
            continue
        declaration, equals, _ = text.partition(" = ") if " = " in text else text.partition("=")
        name, _, annotation = declaration.partition(":")
        parameters.append(Parameter(name.strip(), annotation.strip(), bool(equals)))
    return Signature(tuple(parameters), (matched[2] or "").strip())


def _split(text: str) -> list[str]:
    """At the commas that are outside of all brackets."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "([{<") - (character in ")]}>")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]
