"""Llama 3.2 and 4 as vLLM's templates tell them, and ToolACE: a list of calls in Python."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from specrun.text.tool_formats.base import CallReader, Schema, Spelling, ToolFormat, arguments_of, separated, text_of

_WORDS = {"true": True, "false": False, "null": None}
"""JSON's, which models write in Python too."""
_COMMA = '", "'


class PythonCall(CallReader):
    """The arguments of a call up to its bracket. They are known when all have come."""

    def __init__(self, name: str, _schemas: Mapping[str, Schema]) -> None:
        super().__init__()
        self.name = name
        self._depth = 1
        self._quote = ""
        self._is_escaped = False

    @override
    def read(self, text: str) -> str:
        for index, character in enumerate(text):
            if self._quote:
                if self._is_escaped or character == "\\":
                    self._is_escaped = not self._is_escaped
                elif character == self._quote:
                    self._quote = ""
            elif character in "\"'":
                self._quote = character
            elif character in "([{":
                self._depth += 1
            elif character in ")]}":
                self._depth -= 1
                if not self._depth:
                    self.has_ended = True
                    self.text += text[: index + 1]
                    return text[index + 1 :]
        self.text += text
        return ""

    @override
    def call(self) -> tuple[str, str] | None:
        if not self.has_ended:
            return None
        try:
            parsed = ast.parse(f"f({self.text}", mode="eval").body
            if not isinstance(parsed, ast.Call) or parsed.args:
                return None
            return self.name, text_of({str(word.arg): _value(word.value) for word in parsed.keywords if word.arg})
        except (SyntaxError, ValueError, RecursionError, MemoryError, TypeError):
            return None


def _value(node: ast.expr) -> Any:
    """What a literal of Python, or JSON, says. Raises ValueError for anything else."""
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, ast.Dict):
        keys = [key and _value(key) for key in node.keys]
        return dict(zip(keys, map(_value, node.values), strict=True))
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item) for item in node.elts]
    return ast.literal_eval(node)


def _rules(name: str, schema: Schema, _added: Mapping[str, int]) -> list[str]:
    """Each as JSON writes it."""
    known = arguments_of(schema)
    value_rules = [
        f"{name}_v{number}: %json {json.dumps(described)}" for number, described in enumerate(known.schemas.values())
    ]
    rules = {key: f"{json.dumps(f'{key}=')} {name}_v{number}" for number, key in enumerate(known.schemas)}
    required, optional = ([rules[key] for key in keys] for keys in (known.required, known.optional))
    return [f"{name}: {separated(required, optional, _COMMA)}", *value_rules]


PYTHONIC = ToolFormat(
    "pythonic",
    marks=[["[func_name1("], ["[func1("]],
    opening=r"<\|python_start\|>\s*\[\s*(?P<name>[A-Za-z_][\w.-]*)\(",
    bare=r"\s*\[\s*(?P<name>[A-Za-z_][\w.-]*)\(",
    following=r"\s*,\s*(?P<name>[A-Za-z_][\w.-]*)\(",
    reader=PythonCall,
    closings=[r"\s*\]", r"\s*<\|python_end\|>"],
    tags=["<|python_start|>", "<|python_end|>"],
    spelling=Spelling("NAME(", ")", "[", "]", ", ", rules=_rules),
)
