"""Arguments between tags, each as plain text: Qwen3-Coder's, GLM's and MiniMax'."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import regex
from typing_extensions import override

from specrun.text.tool_formats.base import (
    EMPTY,
    LONGEST_HELD,
    CallReader,
    Schema,
    arguments_of,
    literal,
    text_of,
    typed,
)


class XmlArguments(CallReader):
    """Arguments in turn, each with a head (an expression, whose group ``key`` is its name) and a tail, and an end."""

    def __init__(self, name: str, schema: Schema, head: str, tail: str, end: str) -> None:
        super().__init__()
        self.name = name
        self._schema = schema
        self._head, self._tail, self._end = regex.compile(head), tail, regex.compile(end)
        self._keys: set[str] = set()
        self._left = ""
        """What has come and is not decided."""
        self._key: str | None = None
        """Name of the argument whose value has begun."""
        self._is_call = False

    @override
    def read(self, text: str) -> str:
        self.text += text
        known, self._left = len(self._left), self._left + text
        while not self.has_ended:
            if self._key is not None:
                index = self._left.find(self._tail, max(0, known - len(self._tail)))
                if index < 0:
                    return ""
                self._add(self._key, self._left[:index].removeprefix("\n").removesuffix("\n"))
                self._key, self._left, known = None, self._left[index + len(self._tail) :], 0
            elif (end := self._end.match(self._left, partial=True)) and not end.partial:
                return self._close(end.end(), True)
            elif (head := self._head.match(self._left, partial=True)) and not head.partial:
                if (key := head["key"].strip()) in self._keys:
                    return self._close(0, False)
                self._key, self._left, known = key, self._left[head.end() :], 0
            elif (end or head) and len(self._left) <= LONGEST_HELD:  # It has come in part.
                return ""
            else:
                return self._close(0, False)
        return ""

    def _add(self, key: str, value: str) -> None:
        written = text_of(typed(value, arguments_of(self._schema).schemas.get(key)))
        self.arguments += f"{', ' if self._keys else '{'}{text_of(key)}: {written}"
        self._keys.add(key)

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


def xml_reader(head: str, tail: str, end: str) -> Callable[[str, Mapping[str, Schema]], CallReader]:
    """Makes readers of such calls."""
    return lambda name, schemas: XmlArguments(name, schemas.get(name, {}), head, tail, end)


def xml_rules(head: str, tail: str) -> Callable[[str, Schema, Mapping[str, int]], list[str]]:
    """Rules of a grammar for such arguments, in the order of the schema; ``KEY`` in ``head`` is an argument's name."""

    def rules(name: str, schema: Schema, added: Mapping[str, int]) -> list[str]:
        parts, value_rules, known = [], [], arguments_of(schema)
        for number, (key, described) in enumerate(known.schemas.items()):
            rule = f"{name}_{number}"
            parts.append(rule if key in known.required else f"{rule}?")
            value_rules += _argument(rule, literal(head.replace("KEY", key), added), described, tail, added)
        return [f"{name}: {' '.join(parts) or EMPTY}", *value_rules]

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
