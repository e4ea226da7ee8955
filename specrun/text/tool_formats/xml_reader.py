"""Arguments between tags, each as plain text: Qwen3-Coder's, GLM's and MiniMax'."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import regex
from typing_extensions import override

from specrun.text.tool_formats.base import EMPTY, CallReader, Schema, literal, property_of, text_of, typed


class XmlArguments(CallReader):
    """Arguments in turn, each an expression with the groups ``key`` and ``value``, and an end."""

    def __init__(self, name: str, schema: Schema, argument: str, end: str) -> None:
        super().__init__()
        self.name = name
        self._schema = schema
        self._argument, self._end = regex.compile(argument, regex.DOTALL), regex.compile(end)
        self._keys: set[str] = set()
        self._left = ""
        """What has come and is not decided."""
        self._is_call = False

    @override
    def read(self, text: str) -> str:
        self.text += text
        self._left += text
        while not self.has_ended:
            if end := self._end.match(self._left, partial=True):
                if end.partial and not self._argument.match(self._left, partial=True):
                    return ""
                if not end.partial:
                    return self._close(end.end(), True)
            found = self._argument.match(self._left, partial=True)
            if found is None:
                return self._close(0, False)
            if found.partial:
                return ""
            key, value = found["key"].strip(), typed(found["value"], property_of(self._schema, found["key"].strip()))
            if key in self._keys:
                return self._close(0, False)
            self.arguments += f"{', ' if self._keys else '{'}{text_of(key)}: {text_of(value)}"
            self._keys.add(key)
            self._left = self._left[found.end() :]
        return ""

    @override
    def call(self) -> tuple[str, str] | None:
        return (self.name, self.arguments) if self._is_call else None

    def _close(self, taken: int, is_call: bool) -> str:
        self.has_ended, self._is_call = True, is_call
        rest, self._left = self._left[taken:], ""
        if rest:
            self.text = self.text[: -len(rest)]
        if is_call:
            self.arguments += "}" if self._keys else "{}"
        return rest


def xml_reader(argument: str, end: str) -> Callable[[str, Mapping[str, Schema]], CallReader]:
    """Makes readers of such calls."""
    return lambda name, schemas: XmlArguments(name, schemas.get(name, {}), argument, end)


def xml_rules(head: str, tail: str) -> Callable[[str, Schema, Mapping[str, int]], list[str]]:
    """Rules of a grammar for such arguments, in the order of the schema; ``KEY`` in ``head`` is an argument's name."""

    def rules(name: str, schema: Schema, added: Mapping[str, int]) -> list[str]:
        required, parts, own = schema.get("required") or [], [], []
        properties = schema.get("properties")
        for number, (key, described) in enumerate(properties.items() if isinstance(properties, Mapping) else ()):
            rule = f"{name}_{number}"
            parts.append(rule if key in required else f"{rule}?")
            own += _argument(rule, literal(head.replace("KEY", key), added), described, tail, added)
        return [f"{name}: {' '.join(parts) or EMPTY}", *own]

    return rules


def _argument(rule: str, head: str, described: object, tail: str, added: Mapping[str, int]) -> list[str]:
    kind = described.get("type") if isinstance(described, Mapping) else None
    choices = described.get("enum") if isinstance(described, Mapping) else None
    if kind == "string" and isinstance(choices, list) and choices:
        words = " | ".join(json.dumps(str(choice), ensure_ascii=False) for choice in choices)
        return [f"{rule}: {head} ({words}) {literal(tail, added)}"]
    if kind != "string":
        value = json.dumps(
            {"x-guidance": {"whitespace_pattern": " "}, **described} if isinstance(described, Mapping) else {}
        )
        return [f"{rule}: {head} {rule}_value {literal(tail, added)}", f"{rule}_value: %json {value}"]
    if any(tail.startswith(token) for token in added):
        return [f"{rule}: {head} {rule}_text {literal(tail, added)}", f"{rule}_text: /(?s:.*)/"]
    return [f"{rule}: {head} {rule}_text", f"{rule}_text[suffix={json.dumps(tail)}]: /(?s:.*)/"]
