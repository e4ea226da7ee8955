"""FunctionGemma: arguments in braces, their texts between tags."""

from __future__ import annotations

import json
from collections.abc import Mapping

import regex
from typing_extensions import override

from specrun.text.tool_formats.base import (
    CallReader,
    Schema,
    Spelling,
    ToolFormat,
    arguments_of,
    literal,
    separated,
    text_of,
)

_TEXT, _COMMA = "<escape>", '","'
_TOKENS = regex.compile(
    r'<escape>(?P<text>.*?)<escape>|(?P<mark>[{}\[\],:])|(?P<word>"(?:[^"\\]|\\.)*"|[^{}\[\],:<"]+)', regex.DOTALL
)


class GemmaArguments(CallReader):
    """The arguments up to the brace that closes them. They are known when all have come."""

    def __init__(self, name: str, _schemas: Mapping[str, Schema]) -> None:
        super().__init__()
        self.name = name
        self._position = self._depth = 0
        """How far ``text`` is read, and how many braces and brackets are open there."""
        self._in_text = False
        """True within a text, which only a tag or a quote ends: it is not looked at again before one has come."""

    @override
    def read(self, text: str) -> str:
        """A brace in a text closes nothing, so an unfinished text is waited for."""
        self.text += text
        if self._in_text and not (">" in text or '"' in text):
            return ""
        while (token := _TOKENS.match(self.text, self._position, partial=True)) and not token.partial:
            self._position = token.end()
            self._depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(token["mark"] or "", 0)
            if token["mark"] and not self._depth:
                break
        if token and (token.partial or self._depth):
            self._in_text = token.partial
            return ""
        self.has_ended = True
        self.text, rest = self.text[: self._position], self.text[self._position :]
        return rest

    @override
    def call(self) -> tuple[str, str] | None:
        """JSON with its texts in tags, or in quotes as it has them, and keys without."""
        tokens = list(_TOKENS.finditer(self.text))
        parts = []
        for index, token in enumerate(tokens):
            if token["text"] is not None:
                parts.append(text_of(token["text"]))
            elif token["mark"]:
                parts.append(token["mark"])
            elif index + 1 < len(tokens) and tokens[index + 1]["mark"] == ":" and '"' not in token["word"]:
                parts.append(text_of(token["word"].strip()))
            else:
                parts.append(token["word"])
        try:
            arguments = json.loads("".join(parts))
        except (ValueError, RecursionError):
            return None
        return (self.name, text_of(arguments)) if self.has_ended and isinstance(arguments, dict) else None


def _rules(name: str, schema: Schema, added: Mapping[str, int]) -> list[str]:
    """Texts between tags, others as JSON writes them."""
    known, rules, value_rules = arguments_of(schema), dict[str, str](), []
    quote = literal(_TEXT, added)
    for number, (key, described) in enumerate(known.schemas.items()):
        rule = rules[key] = f"{name}_{number}"
        is_text = isinstance(described, Mapping) and described.get("type") == "string"
        value = f"{quote} {rule}_text {quote}" if is_text else f"{rule}_value"
        value_rules.append(f"{rule}: {json.dumps(f'{key}:')} {value}")
        value_rules.append(f"{rule}_text: /[^<]*/" if is_text else f"{rule}_value: %json {json.dumps(described)}")
    required, optional = ([rules[key] for key in keys] for keys in (known.required, known.optional))
    return [f"{name}: {separated(required, optional, _COMMA)}", *value_rules]


FUNCTION_GEMMA = ToolFormat(
    "function_gemma",
    marks=[["<start_function_call>"]],
    opening=r"<start_function_call>\s*call:(?P<name>[\w-]+)\s*(?=\{)",
    reader=GemmaArguments,
    closings=[r"\s*<end_function_call>"],
    tags=["<start_function_call>", "<end_function_call>", _TEXT],
    spelling=Spelling("<start_function_call>call:NAME{", "}<end_function_call>", rules=_rules),
)
