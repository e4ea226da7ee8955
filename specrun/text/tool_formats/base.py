"""What a form of calls is: how calls begin and end in a text, how one is read, and how a grammar spells it."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from uuid import uuid4

from specrun.text.grammar import WHITESPACE
from specrun.text.tools import Tools

Schema = Mapping[str, Any]
"""A JSON schema of a function's arguments."""

LONGEST_HELD = 1000
"""Characters that are held at most until it is known what they are; to look at them again takes time."""
EMPTY = '""'
"""No text, in Lark."""


class CallReader(ABC):
    """A call, read while it arrives. It may turn out to be none."""

    def __init__(self) -> None:
        self.name = ""
        self.arguments = ""
        """JSON text of the arguments, as far as it is certain. Once there is any, ``name`` is certain too."""
        self.text = ""
        """All that was read, as it stands in the text."""
        self.has_ended = False
        """True once it is complete, or something follows that no call has."""

    @abstractmethod
    def read(self, text: str) -> str:
        """Take as much of ``text`` as belongs to the call; the rest."""

    @abstractmethod
    def call(self) -> tuple[str, str] | None:
        """The function's name and its arguments as JSON text, where nothing more comes; None where it is no call."""


@dataclass(frozen=True)
class Spelling:
    """How a grammar writes calls. ``NAME`` stands for the function's."""

    head: str
    tail: str
    """Text before and behind the arguments."""
    begin: str = ""
    end: str = ""
    """Text before the first call and behind the last one."""
    between: str | None = ""
    """Text between two calls; None: such models make one call."""
    rules: Callable[[str, Schema, Mapping[str, int]], list[str]] | None = None
    """Rules of Lark for the arguments: of the rule's name, the schema, and ids of the added tokens. None: JSON."""


@dataclass(frozen=True)
class ToolFormat:
    """How a family of models writes calls. Expressions are in the syntax of the package regex."""

    name: str
    marks: Sequence[Sequence[str]]
    """Each: texts that are all in chat templates of this form."""
    opening: str
    """Expression of what a call begins with, wherever it stands. Its group ``name`` is the function's."""
    reader: Callable[[str, Mapping[str, Schema]], CallReader]
    """Makes the reader of what follows the opening, from the name (or "") and the schemas of all functions."""
    spelling: Spelling
    bare: str = ""
    """Expression of a call's beginning where nothing stands before it, or another call; "": none."""
    following: str = ""
    """Expression of a further call's beginning, directly behind a call; "": none."""
    closings: Sequence[str] = ()
    """Expressions of what may follow a call, each once and in this order. It is left out."""
    tags: Sequence[str] = ()
    """Texts in calls that a tokenizer may count as special tokens, which have no text otherwise."""
    make_id: Callable[[str, int], str] = lambda _name, _number: f"call_{uuid4().hex[:24]}"
    """The id of a call, from the function's name and the call's number: some templates want one of a kind."""

    def fits(self, template: str) -> bool:
        """Whether a chat template has this form."""
        return any(all(mark in template for mark in marks) for marks in self.marks)

    def grammar(self, tools: Tools, added: Mapping[str, int], answer: Any = None, free: bool = False) -> str:
        """The calls that ``tools`` ask for, in llguidance's form of Lark.

        added: ids of the tokenizer's added tokens, which are no text for llguidance. answer: a JSON schema of what
        may be written instead of calls. free: any text may be written before calls, or without any.
        """
        spelling, schemas = self.spelling, tools.schemas()
        more = f" ({literal(spelling.between, added)} call)*" if tools.several and spelling.between is not None else ""
        calls = f"{literal(spelling.begin, added)} call{more} {literal(spelling.end, added)}"
        start = f"text? ({calls})?" if free else calls if answer is None else f"{calls} | answer"
        rules = [f"start: {start}", "call: " + " | ".join(f"function{number}" for number in range(len(schemas)))]
        if free:
            rules.append("text: /(?s:.+)/")
        if answer is not None:
            spaces = {"x-guidance": {"whitespace_pattern": WHITESPACE}}
            rules.append(f"answer: %json {json.dumps({**spaces, **answer} if isinstance(answer, dict) else answer)}")
        for number, (name, schema) in enumerate(schemas.items()):
            head, tail = (text.replace("NAME", name) for text in (spelling.head, spelling.tail))
            rule = f"arguments{number}"
            rules.append(f"function{number}: {literal(head, added)} {rule} {literal(tail, added)}")
            rules += spelling.rules(rule, schema, added) if spelling.rules else [f"{rule}: %json {json.dumps(schema)}"]
        return "\n".join(rules)

    def can_be_free(self, added: Mapping[str, int]) -> bool:
        """Whether a grammar can tell a call from the text before it: where it begins with a token of its own."""
        first = self.spelling.begin or self.spelling.head
        return any(first.startswith(token) for token in added)


def literal(text: str, added: Mapping[str, int]) -> str:
    """A text in Lark, with its added tokens by their ids."""
    special = sorted((token for token in added if token in text), key=len, reverse=True)
    parts = re.split("(" + "|".join(map(re.escape, special)) + ")", text) if special else [text]
    return " ".join(
        f"<[{added[part]}]>" if part in special else json.dumps(part, ensure_ascii=False) for part in parts if part
    )


def text_of(value: Any) -> str:
    """JSON text of an argument."""
    return json.dumps(value, ensure_ascii=False)


def typed(text: str, schema: Any) -> Any:
    """An argument that was written as plain text: of the type that its ``schema`` names; a text where it has another.

    Models write Python's words where JSON's are meant.
    """
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    if kinds == "string" or (isinstance(kinds, list) and "string" in kinds and text != "null"):
        return text
    try:
        return json.loads({"True": "true", "False": "false", "None": "null"}.get(text.strip(), text))
    except (ValueError, RecursionError):
        return text


class Arguments(NamedTuple):
    """The arguments of a function, by its schema."""

    schemas: Mapping[str, Any]
    """Their schemas by name."""
    required: Sequence[str]
    """Names of those that must be there."""

    @property
    def optional(self) -> list[str]:
        """Names of the others."""
        return [key for key in self.schemas if key not in self.required]


def arguments_of(schema: Schema) -> Arguments:
    """The arguments that ``schema`` declares; none where it is malformed."""
    described, required = schema.get("properties"), schema.get("required")
    schemas = described if isinstance(described, Mapping) else {}
    return Arguments(schemas, [key for key in schemas if isinstance(required, list) and key in required])


def separated(required: Sequence[str], optional: Sequence[str], separator: str) -> str:
    """Lark of all that is ``required`` and then some of what is ``optional``, in order. separator: Lark between two."""

    def behind(rules: Sequence[str]) -> str:
        return "".join(f" ({separator} {rule})?" for rule in rules)

    if required:
        return f" {separator} ".join(required) + behind(optional)
    ways = [rule + behind(optional[number + 1 :]) for number, rule in enumerate(optional)]
    return " | ".join([*ways, EMPTY])
