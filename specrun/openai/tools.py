"""Reads the tools of OpenAI's bodies, and which of them may be called."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from specrun import arguments
from specrun.errors import RequestError
from specrun.openai.fields import Fields, as_object, wrong
from specrun.text.tools import Tools


class _Choice(NamedTuple):
    """A ``tool_choice``."""

    kind: str
    """Kind of the choice: auto, none, required, or function."""
    names: Sequence[str] = ()
    """Names of the functions that may be called; empty: all."""


def read_tools(fields: Fields) -> Tools | None:
    """Read ``tools``, ``tool_choice`` and ``parallel_tool_calls``; None where no tool may be called.

    Raises RequestError.
    """
    tools = fields.take("tools", _definitions)
    choice = fields.take("tool_choice", _choice) or _Choice("auto")
    several = fields.take("parallel_tool_calls", arguments.flag)
    if tools is None:
        if choice.kind in ("required", "function"):
            raise RequestError("tool_choice: needs tools", "tool_choice")
        return None
    if choice.kind == "none":
        return None
    if choice.kind == "function":
        return replace(tools, must_call=choice.names, several=False)
    if choice.names:
        replace(tools, must_call=choice.names)  # All of them must be defined.
        tools = Tools([tool for tool in tools.definitions if tool["function"]["name"] in choice.names])
    names = [tool["function"]["name"] for tool in tools.definitions]
    return replace(tools, must_call=names if choice.kind == "required" else (), several=several is not False)


def _definitions(name: str, value: Any) -> Tools | None:
    return None if value == [] else Tools(value)


def _choice(name: str, value: Any) -> _Choice:
    if value in ("auto", "none", "required"):
        return _Choice(value)
    kind = value.get("type") if isinstance(value, dict) else None
    if kind == "function":
        return _Choice("function", (_name(name, value),))
    if kind != "allowed_tools":
        raise wrong(name, value, "auto, none, required, or an object of the type function or allowed_tools")
    name = f"{name}.allowed_tools"
    allowed = as_object(name, value.get("allowed_tools"))
    mode, tools = allowed.get("mode"), allowed.get("tools")
    if mode not in ("auto", "required"):
        raise wrong(f"{name}.mode", mode, "auto or required")
    if not isinstance(tools, list) or not tools:
        raise wrong(f"{name}.tools", tools, "a list of functions")
    return _Choice(mode, tuple(_name(f"{name}.tools[{number}]", tool) for number, tool in enumerate(tools)))


def _name(where: str, tool: Any) -> str:
    """The name in ``{"type": "function", "function": {"name": ..}}``."""
    function = as_object(f"{where}.function", as_object(where, tool).get("function"))
    return arguments.text(f"{where}.function.name", function.get("name"))
