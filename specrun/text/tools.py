"""Tools: the functions that a model may call."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specrun import arguments
from specrun.errors import RequestError

MAX_TOOLS = 128
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")


@dataclass(frozen=True)
class Tools:
    """The functions that a model is told of.

    Raises RequestError, beginning with the name of what is wrong, as in ``tools[0].function.name``.
    """

    definitions: Sequence[Mapping[str, Any]]
    """OpenAI's definitions: ``{"type": "function", "function": {"name": .., "parameters": JSON schema}}``."""
    must_call: Sequence[str] = ()
    """The output is a call of one of these functions; none given: the model decides, and nothing is constrained."""
    several: bool = True
    """True if the model may call more than once."""

    def __post_init__(self) -> None:
        """Check the definitions, and that what must be called is defined."""
        if not isinstance(self.definitions, list | tuple) or not self.definitions:
            raise RequestError(f"tools {arguments.show(self.definitions)}: expected a list of functions", "tools")
        if len(self.definitions) > MAX_TOOLS:
            raise RequestError(f"tools: {len(self.definitions)} functions, expected at most {MAX_TOOLS}", "tools")
        names: set[str] = set()
        for number, definition in enumerate(self.definitions):
            name = _check_definition(f"tools[{number}]", definition)
            if name in names:
                where = f"tools[{number}].function.name"
                raise RequestError(f"{where} {name!r}: an earlier function has it", where)
            names.add(name)
        for name in self.must_call:
            if name not in names:
                raise RequestError(f"tool_choice {arguments.show(name)}: tools have no such function", "tool_choice")

    def for_template(self) -> list[dict[str, Any]]:
        """The definitions as chat templates take them: without ``strict``, which is not for the model."""
        return [
            {**tool, "function": {name: value for name, value in tool["function"].items() if name != "strict"}}
            for tool in self.definitions
        ]

    @property
    def are_strict(self) -> bool:
        """Whether a function wants its arguments to follow its schema."""
        return any(tool["function"].get("strict") for tool in self.definitions)

    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """JSON schemas of the arguments of the functions that must, or else may be called, by name."""
        functions = [tool["function"] for tool in self.definitions]
        names = self.must_call or [function["name"] for function in functions]
        return {each["name"]: _schema(each.get("parameters")) for each in functions if each["name"] in names}


def _check_definition(where: str, definition: Any) -> str:
    """The function's name."""
    kind = _object(where, definition).get("type")
    if kind != "function":
        message = f"{where}.type {arguments.show(kind)}: expected function, the only type that is supported"
        raise RequestError(message, f"{where}.type")
    function = _object(f"{where}.function", definition.get("function"))
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(
            f"{where}.function.name {arguments.show(name)}: expected 1 to 64 letters, digits, underscores and hyphens",
            f"{where}.function.name",
        )
    arguments.optional_text(f"{where}.function.description", function.get("description"))
    if function.get("strict") is not None:
        arguments.flag(f"{where}.function.strict", function["strict"])
    if function.get("parameters") is not None:
        kind = _object(f"{where}.function.parameters", function["parameters"]).get("type", "object")
        if kind != "object":
            named = f"{where}.function.parameters.type"
            raise RequestError(f"{named} {arguments.show(kind)}: expected object", named)
    return name


def _object(name: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise RequestError(f"{name} {arguments.show(value)}: expected an object", name)
    return value


def _schema(parameters: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """The schema of a function's arguments, which are an object. A function without parameters has none."""
    schema = {"properties": {}, "additionalProperties": False} if parameters is None else parameters
    spaces = {"x-guidance": {"whitespace_pattern": " "}}  # As the templates write calls.
    return {**spaces, **schema, "type": "object"}
