"""Calls of tools: found in a text however it is cut, and spelt by a grammar that admits nothing else."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest

from specrun.errors import RequestError
from specrun.text.tool_call_parser import CallDelta, ExpectedCalls, Seen, ToolCallParser
from specrun.text.tool_formats import find_format
from specrun.text.tool_formats.base import ToolFormat
from specrun.text.tool_formats.hermes import HERMES
from specrun.text.tool_formats.llama3 import LLAMA3
from specrun.text.tools import MAX_TOOLS, Tools

Found = tuple[str, list[tuple[str, str]]]

F = '{"name": "f", "arguments": {"a": 1}}'
G = '{"name": "g", "arguments": {"b": "} </tool_call> \\" {", "c": [{"d": {}}]}}'
F_FOUND, G_FOUND = ("f", '{"a": 1}'), ("g", '{"b": "} </tool_call> \\" {", "c": [{"d": {}}]}')
P = '{"name": "f", "parameters": {"a": 1}}'

WELL_FORMED: list[tuple[ToolFormat, str, Found]] = [
    (HERMES, "", ("", [])),
    (HERMES, "Hello.\n", ("Hello.\n", [])),
    (HERMES, f"<tool_call>\n{F}\n</tool_call>", ("", [F_FOUND])),
    (HERMES, f"<tool_call>{G}</tool_call>\n", ("", [G_FOUND])),
    (HERMES, f"Wait: a < b.\n\n<tool_call>\n{F}\n</tool_call>\n<tool_call>\n{G}\n</tool_call>",
     ("Wait: a < b.", [F_FOUND, G_FOUND])),
    (HERMES, f"<tool_call>\n{F}\n</tool_call> and then", ("and then", [F_FOUND])),
    (HERMES, f"<tool_call>\n{F}", ("", [F_FOUND])),
    (HERMES, f"<tool_call>\n{F}\n</tool_", ("", [F_FOUND])),
    (HERMES, f"<tool_call>\n{F[:-1]}\n</tool_call>", ("", [F_FOUND])),  # A brace too few, which models do forget.
    (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', ("", [F_FOUND])),
    (HERMES, '<tool_call>{"name": "f", "arguments": {}, "id": "x"}</tool_call>', ("", [("f", "{}")])),
    (HERMES, '<tool_call>{"name": "\\u00e9", "arguments": {"é": "日本"}}</tool_call>', ("", [("é", '{"é": "日本"}')])),
    (HERMES, f"{P} <tool_call", (f"{P} <tool_call", [])),
    (LLAMA3, P, ("", [F_FOUND])),
    (LLAMA3, f"\n {P}; {P}", ("", [F_FOUND, F_FOUND])),
    (LLAMA3, f"<|python_tag|>{P}\n{P}", ("", [F_FOUND, F_FOUND])),
    (LLAMA3, f"Sure. <|python_tag|>{F};", ("Sure.", [F_FOUND])),
    (LLAMA3, '{"type": "function", "name": "f", "parameters": {}}', ("", [("f", "{}")])),
    (LLAMA3, f"I call {P}", (f"I call {P}", [])),
    (LLAMA3, "<|python_tag|>print(1)", ("<|python_tag|>print(1)", [])),
    (LLAMA3, '{"answer": [1, 2]} ', ('{"answer": [1, 2]} ', [])),
]  # fmt: skip
NO_CALLS: list[tuple[ToolFormat, str]] = [
    (HERMES, "<tool_call>\n\n</tool_call>"),
    (HERMES, "<tool_call>f(1)</tool_call>"),
    (HERMES, "a <tool_call> b </tool_call> c"),
    (HERMES, '<tool_call>\n{"name": "f"}\n</tool_call>'),
    (HERMES, '<tool_call>{"name": 1, "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>{"name": "f", "arguments": 5}</tool_call>'),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{}"}</tool_call>'),
    (HERMES, '<tool_call>{"name": "f", "argu'),
    (HERMES, '<tool_call>{"name": "\\ud8", "arguments": {}}</tool_call>'),
    (HERMES, '<tool_call>\n{name: "f", "arguments": {}}\n</tool_call>'),
    (HERMES, "<tool_call>\n{" + '"a":{' * 5000),
    (LLAMA3, '{"name": "f", "parameters": [1]}'),
    (LLAMA3, '{"name": "f", "parameters'),
    (LLAMA3, '{"name": }'),
    (LLAMA3, " {a: 1} "),
]
"""What stays as it is, in streams too."""
BROKEN_ARGUMENTS = [
    '<tool_call>\n{"name": "f", "arguments": {"a": 1, "b": "lon',
    '<tool_call>\n{"name": "f", "arguments": {"a": }}\n</tool_call>',
    '<tool_call>\n{"name": "f", "arguments": {"a": (1)}}\n</tool_call>',
    '<tool_call>\n{"name": "f", "arguments": {"a": "two\nlines"}}\n</tool_call>',
]


def gather(pieces: Sequence[Seen]) -> Found:
    """What a client makes of a stream."""
    calls: list[tuple[str, str]] = []
    for delta in itertools.chain.from_iterable(piece.calls for piece in pieces):
        if delta.name is not None:
            assert delta.arguments == "" and delta.index == len(calls)
            calls.append((delta.name, ""))
        else:
            name, before = calls[delta.index]
            calls[delta.index] = (name, before + delta.arguments)
    return "".join(piece.content for piece in pieces), calls


def parse(form: ToolFormat, parts: Sequence[str], holds: bool, several: bool = True) -> Found:
    parser = ToolCallParser(ExpectedCalls(form, several), holds)
    return gather([*(parser.push(part) for part in parts), parser.push("", ended=True)])


def splits(text: str) -> list[list[str]]:
    """The text in one piece, in two at every place, and in pieces of one to four characters."""
    even = [[text[place : place + size] for place in range(0, len(text), size)] for size in range(1, 5)]
    return [[text], *even, *([text[:place], text[place:]] for place in range(len(text)))]


@pytest.mark.parametrize("holds", [True, False])
def test_calls_are_found_however_a_text_is_cut(holds: bool) -> None:
    for form, text, expected in WELL_FORMED:
        for parts in splits(text):
            assert parse(form, parts, holds) == expected, parts


@pytest.mark.parametrize("holds", [True, False])
def test_what_is_no_call_stays_text(holds: bool) -> None:
    for form, text in NO_CALLS:
        for parts in splits(text)[: 200 if len(text) < 1000 else 3]:
            assert parse(form, parts, holds) == (text, []), parts


def test_arguments_that_break_off_are_text_in_whole_answers_and_stand_in_streams() -> None:
    for text in BROKEN_ARGUMENTS:
        for parts in splits(text):
            assert parse(HERMES, parts, holds=True) == (text, []), parts
        streamed = {str(parse(HERMES, parts, holds=False)) for parts in splits(text)}
        assert len(streamed) == 1 and "('f', '{\"a\": " in streamed.pop()


def test_arguments_arrive_as_they_are_written_and_nothing_of_a_tag_is_shown() -> None:
    text = f"Well.\n<tool_call>\n{G}\n</tool_call>"
    parser = ToolCallParser(ExpectedCalls(HERMES, True), holds=False)
    seen = [parser.push(character) for character in text]
    assert "".join(piece.content for piece in seen) == "Well."
    assert sum(len(piece.calls) for piece in seen) == 1 + len(G_FOUND[1])
    first = next(place for place, piece in enumerate(seen) if piece.calls)
    assert seen[first].calls[0] == CallDelta(0, "g", "") and first == text.index('{"b"')


def test_one_call_only_where_several_are_not_wanted() -> None:
    text = f"<tool_call>\n{F}\n</tool_call>\n<tool_call>\n{G}\n</tool_call> more"
    for parts in splits(text):
        assert parse(HERMES, parts, True, several=False) == ("", [F_FOUND]) == parse(HERMES, parts, False, False)


def test_a_control_a_parser_that_looks_at_each_piece_alone_fails() -> None:
    text = f"<tool_call>\n{F}\n</tool_call>"

    def alone(parts: Sequence[str]) -> Found:
        parsers = [ToolCallParser(ExpectedCalls(HERMES, True), True) for _ in parts]
        return gather([parser.push(part, ended=True) for parser, part in zip(parsers, parts, strict=True)])

    assert alone([text]) == ("", [F_FOUND])
    assert sum(alone(parts) == ("", [F_FOUND]) for parts in splits(text)[1:]) < 20


# --- forms and definitions


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("return <tool_call>\n{\"name\": <function-name>, \"arguments\": <args-json-object>}\n</tool_call>", HERMES),
        ("Environment: ipython .. {{- '\"parameters\": ' }}", LLAMA3),
        ('{"name": function name, "parameters": ..} <|python_tag|>', LLAMA3),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", None),
    ],
)  # fmt: skip
def test_the_form_is_found_in_the_template(template: str, form: ToolFormat | None) -> None:
    assert find_format(template) is form


def tool(name: Any = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


BAD_TOOLS: list[tuple[Any, str]] = [
    ("x", "tools"),
    ({}, "tools"),
    ([], "tools"),
    ([1], "tools[0]"),
    ([{}], "tools[0].type"),
    ([{"type": "custom", "custom": {"name": "f"}}], "tools[0].type"),
    ([{"type": "function"}], "tools[0].function"),
    ([{"type": "function", "function": "f"}], "tools[0].function"),
    *(([tool(), tool(name)], "tools[1].function.name") for name in (None, 1, "", "a b", "a" * 65, "é", "f", "a\n")),
    ([tool(description=1)], "tools[0].function.description"),
    ([tool(strict=1)], "tools[0].function.strict"),
    ([tool(parameters="{}")], "tools[0].function.parameters"),
    ([tool(parameters=[])], "tools[0].function.parameters"),
    ([tool(parameters={"type": "array"})], "tools[0].function.parameters.type"),
    ([tool(f"f{number}") for number in range(MAX_TOOLS + 1)], "tools"),
]


def test_bad_definitions_are_named() -> None:
    for definitions, name in BAD_TOOLS:
        with pytest.raises(RequestError) as caught:
            Tools(definitions)
            pytest.fail(f"accepted: {definitions}")
        said = str(caught.value)
        assert said.partition(" ")[0].rstrip(":") == name and "\n" not in said and len(said) < 300, said
    with pytest.raises(RequestError, match="tool_choice 'g'"):
        Tools([tool()], must_call=("g",))
    assert len(Tools([tool(f"f{number}") for number in range(MAX_TOOLS)]).definitions) == MAX_TOOLS


def test_templates_see_the_definitions_without_strict() -> None:
    definition = tool(description="d", parameters={"type": "object"}, strict=True)
    (shown,) = Tools([definition]).for_template()
    assert shown == tool(description="d", parameters={"type": "object"}) and "strict" in definition["function"]
    assert json.loads(json.dumps(shown)) == shown
