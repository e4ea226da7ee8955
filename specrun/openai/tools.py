"""Tools as OpenAI's bodies define them and ask for them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from specrun import arguments
from specrun.errors import RequestError
from specrun.openai.fields import Fields, as_object, wrong
from specrun.text.tools import Tools


class _Choice(NamedTuple):
    """A ``tool_choice``."""

    kind: str
    """auto, none, required, or function."""
    name: str = ""
    """The function's."""


def read_tools(fields: Fields) -> Tools | None:
    """What ``tools``, ``tool_choice`` and ``parallel_tool_calls`` ask for; None where no tool may be called.

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
        return replace(tools, must_call=(choice.name,), several=False)
    names = [tool["function"]["name"] for tool in tools.definitions]
    return replace(tools, must_call=names if choice.kind == "required" else (), several=several is not False)


def _definitions(name: str, value: Any) -> Tools | None:
    return None if value == [] else Tools(value)


def _choice(name: str, value: Any) -> _Choice:
    if value in ("auto", "none", "required"):
        return _Choice(value)
    expected = 'auto, none, required, or {"type": "function", "function": {"name": ..}}'
    if not isinstance(value, dict) or value.get("type") != "function":
        raise wrong(name, value, expected)
    function = as_object(f"{name}.function", value.get("function"))
    return _Choice("function", arguments.text(f"{name}.function.name", function.get("name")))
