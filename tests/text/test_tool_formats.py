"""Every form of calls: transcripts in the spelling of its family's template, however they are cut, and its grammar."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import AddedToken

from specrun.text.grammar import Constraint
from specrun.text.tool_call_parser import ExpectedCalls, ToolCallParser
from specrun.text.tool_formats import FORMATS, find_format
from specrun.text.tool_formats.base import ToolFormat
from specrun.text.tools import Tools
from tests.helpers.constraints import added_tokens, follows, tokenizer_with
from tests.text.test_tool_calls import Found, gather, splits

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"type": "string", "enum": ["celsius", "kelvin"]},
        "parts": {"type": "array", "items": {"type": "string"}},
        "exact": {"type": "boolean"},
    },
    "required": ["city"],
}
TOOLS = Tools(
    [
        {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}},
        {"type": "function", "function": {"name": "now"}},
    ],
    must_call=("get_weather", "now"),
)
PARIS = ("get_weather", {"city": "Paris", "days": 3, "parts": ["wind", "rain"], "exact": True})
NOW: tuple[str, dict[str, Any]] = ("now", {})
Q = '"'
JSON_PARIS = '{"city": "Paris", "days": 3, "parts": ["wind", "rain"], "exact": true}'

SPELLED: dict[str, tuple[str, list[tuple[str, dict[str, Any]]]]] = {
    "hermes": (
        f'<tool_call>\n{{"name": "get_weather", "arguments": {JSON_PARIS}}}\n</tool_call>\n'
        '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>',
        [PARIS, NOW],
    ),
    "llama3": (f'{{"name": "get_weather", "parameters": {JSON_PARIS}}}', [PARIS]),
    "pythonic": ('[get_weather(city="Paris", days=3, parts=["wind", "rain"], exact=true), now()]', [PARIS, NOW]),
    "mistral": (f"[TOOL_CALLS]get_weather[ARGS]{JSON_PARIS}[TOOL_CALLS]now[ARGS]{{}}", [PARIS, NOW]),
    "mistral_json": (
        f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {JSON_PARIS}}}, {{"name": "now", "arguments": {{}}}}]',
        [PARIS, NOW],
    ),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
        f"```json\n{JSON_PARIS}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n"
        "```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [PARIS, NOW],
    ),
    "deepseek_v31": (
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{JSON_PARIS}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        [PARIS, NOW],
    ),
    "kimi_k2": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        f"{JSON_PARIS}<|tool_call_end|><|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>{{}}"
        "<|tool_call_end|><|tool_calls_section_end|>",
        [PARIS, NOW],
    ),
    "harmony": (
        f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{JSON_PARIS}<|call|>",
        [PARIS],
    ),
    "granite": (
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {JSON_PARIS}}}, {{"name": "now", "arguments": {{}}}}]',
        [PARIS, NOW],
    ),
    "phi4": (
        f'<|tool_call|>[{{"name": "get_weather", "arguments": {JSON_PARIS}}}, {{"name": "now", "arguments": {{}}}}]'
        "<|/tool_call|>",
        [PARIS, NOW],
    ),
    "command": (
        f'<|START_ACTION|>[\n    {{"tool_call_id": "0", "tool_name": "get_weather", "parameters": {JSON_PARIS}}},\n'
        '    {"tool_call_id": "0", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>',
        [PARIS, NOW],
    ),
    "minimax": (
        f'<tool_calls>\n{{"name": "get_weather", "arguments": {JSON_PARIS}}}\n{{"name": "now", "arguments": {{}}}}\n'
        "</tool_calls>",
        [PARIS, NOW],
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
        '<parameter name="days">3</parameter>\n<parameter name="parts">["wind", "rain"]</parameter>\n'
        '<parameter name="exact">true</parameter>\n</invoke>\n<invoke name="now">\n</invoke>\n</minimax:tool_call>',
        [PARIS, NOW],
    ),
    "qwen3_coder": (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
        '<parameter=parts>\n["wind", "rain"]\n</parameter>\n<parameter=exact>\ntrue\n</parameter>\n</function>\n'
        "</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        [PARIS, NOW],
    ),
    "seed_oss": (
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n<parameter=days>\n3\n"
        '</parameter>\n<parameter=parts>\n["wind", "rain"]\n</parameter>\n<parameter=exact>\ntrue\n</parameter>\n'
        "</function>\n</seed:tool_call>\n<seed:tool_call>\n<function=now>\n</function>\n</seed:tool_call>",
        [PARIS, NOW],
    ),
    "glm4": (
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n<arg_key>parts</arg_key>\n"
        '<arg_value>["wind", "rain"]</arg_value>\n<arg_key>exact</arg_key>\n<arg_value>true</arg_value>\n</tool_call>\n'
        "<tool_call>now\n</tool_call>",
        [PARIS, NOW],
    ),
    "function_gemma": (
        "<start_function_call>call:get_weather{city:<escape>Paris<escape>,days:3,"
        'parts:["wind", "rain"],exact:true}<end_function_call>'
        "<start_function_call>call:now{}<end_function_call>",
        [PARIS, NOW],
    ),
}  # fmt: skip
"""A text as the form's grammar spells it, and the calls in it."""

OTHERS: list[tuple[str, str, str, list[tuple[str, dict[str, Any]]]]] = [
    ("pythonic", "[get_weather(city='a \"b\" [c] \\'', exact=True, parts=[], days=None)]", "",
     [("get_weather", {"city": "a \"b\" [c] '", "exact": True, "parts": [], "days": None})]),
    ("pythonic", "<|python_start|>[now()]<|python_end|>", "", [NOW]),
    ("pythonic", "See [1] and f(x).", "See [1] and f(x).", []),
    ("pythonic", "[get_weather(city=open('x'))]", "[get_weather(city=open('x'))]", []),
    ("pythonic", "[now(1)]", "[now(1)]", []),
    ("mistral", 'Well. [TOOL_CALLS] [{"name": "now", "arguments": {}}]', "Well.", [NOW]),
    ("mistral", "[TOOL_CALLS]now{}", "", [NOW]),
    ("mistral", "[TOOL_CALLS]now[CALL_ID]a1B2c3D4e[ARGS]{}", "", [NOW]),
    ("mistral", "[TOOL_CALLS]now[ARGS]{nothing}", "[TOOL_CALLS]now[ARGS]{nothing}", []),
    ("harmony", " to=functions.now<|channel|>commentary json<|message|>{}<|call|>", "", [NOW]),
    ("harmony", "<|start|>assistant<|channel|>commentary to=functions.now <|message|>{}", "", [NOW]),
    ("kimi_k2", "I ask.<|tool_calls_section_begin|><|tool_call_begin|>now<|tool_call_argument_begin|>{} "
     "<|tool_call_end|>", "I ask.", [NOW]),
    ("qwen3_coder", "Look:\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\n<b>\n\n3\n</parameter>\n"
     "</function>\n</tool_call>", "Look:", [("get_weather", {"city": "<b>\n\n3"})]),
    ("qwen3_coder", "<function=get_weather><parameter=city>12</parameter><parameter=days>many</parameter></function>",
     "", [("get_weather", {"city": "12", "days": "many"})]),
    ("qwen3_coder", "<function=now>later</function>", "<function=now>later</function>", []),
    ("glm4", "<tool_call>get_weather<arg_key>city</arg_key><arg_value>é</arg_value></tool_call>", "",
     [("get_weather", {"city": "é"})]),
    ("glm4", "a <tool_call> b", "a <tool_call> b", []),
    ("minimax_m2", '<invoke name="get_weather"><parameter name="unit">kelvin</parameter></invoke>', "",
     [("get_weather", {"unit": "kelvin"})]),
    ("function_gemma",
     "<start_function_call>call:get_weather{city:<escape>a}, b: {<escape>,days:-1}<end_function_call>", "",
     [("get_weather", {"city": "a}, b: {", "days": -1})]),
    ("function_gemma", '<start_function_call>call:get_weather{parts:["a]}", "<b", "c:,\\""]}<end_function_call>', "",
     [("get_weather", {"parts": ["a]}", "<b", 'c:,"']})]),
    ("function_gemma", "<start_function_call>call:now{a b}<end_function_call>",
     "<start_function_call>call:now{a b}<end_function_call>", []),
    ("deepseek_v31", "<｜tool▁call▁begin｜>now<｜tool▁sep｜>[]", "<｜tool▁call▁begin｜>now<｜tool▁sep｜>[]", []),
    ("command", '<|START_ACTION|>[{"tool_name": "now", "parameters": {}}]<|END_ACTION|>', "", [NOW]),
    ("minimax", '<tool_calls>[\n{"name": "now", "arguments": {}}, {"name": "now", "arguments": {}}\n]</tool_calls> ok',
     "ok", [NOW, NOW]),
    ("llama3", '<|python_start|>{"name": "now", "parameters": {}}<|python_end|>', "", [NOW]),
    ("granite", '<|tool_call|>{"name": "now", "arguments": {}}', "", [NOW]),
]  # fmt: skip
"""What models write as well: a form, a text, its content and calls."""

TEMPLATES = {
    "hermes": "<tool_call>\n{{- '{\"name\": ' }}",
    "pythonic": "you should return in the format of [func_name1(params_name1=params_value1), func_name2(..)]",
    "mistral": "[TOOL_CALLS]{{ name }}[ARGS]{{ arguments }}",
    "mistral_json": "[TOOL_CALLS] [{% for tool_call in message.tool_calls %}",
    "deepseek_v3": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + '```json'",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + name + '<｜tool▁sep｜>'",
    "kimi_k2": "<|tool_calls_section_begin|>{% for %}<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>",
    "harmony": "<|start|>assistant to=functions.{{ name }}<|channel|>commentary json<|message|>",
    "granite": "<|tool_call|>",
    "phi4": "<|tool_call|>' + calls + '<|/tool_call|>",
    "command": "<|START_ACTION|>[{% for tc in tool_calls %}",
    "minimax": "<tool_calls>\n",
    "minimax_m2": "<minimax:tool_call>",
    "qwen3_coder": "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>",
    "seed_oss": "<seed:tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>",
    "glm4": "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>",
    "function_gemma": "<start_function_call>call:' + name",
}


def parse(form: ToolFormat, parts: Sequence[str], holds: bool) -> Found:
    parser = ToolCallParser(ExpectedCalls(form, True, schemas=TOOLS.schemas()), holds)
    return gather([*(parser.push(part) for part in parts), parser.push("", ended=True)])


def read(found: Found) -> tuple[str, list[tuple[str, dict[str, Any]]]]:
    return found[0], [(name, json.loads(arguments)) for name, arguments in found[1]]


def test_every_form_has_a_transcript_and_a_template() -> None:
    assert SPELLED.keys() == FORMATS.keys() == TEMPLATES.keys() | {"llama3"}


@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_found_however_a_text_is_cut(name: str) -> None:
    text, calls = SPELLED[name]
    cases = [(text, "", calls), *(case[1:] for case in OTHERS if case[0] == name)]
    if name not in ("llama3", "pythonic"):
        cases.append((f"Let me see.\n{text}", "Let me see.", calls))
    for written, content, expected in cases:
        for parts in splits(written):
            assert read(parse(FORMATS[name], parts, holds=True)) == (content, expected), parts
            if expected:
                assert read(parse(FORMATS[name], parts, holds=False)) == (content, expected), parts


@pytest.mark.parametrize("name", FORMATS)
def test_calls_that_break_off(name: str) -> None:
    """What came is text in a whole answer, or the beginning of a call; nothing is lost and nothing is made up."""
    text, calls = SPELLED[name]
    for end in range(0, len(text), 3):
        content, found = parse(FORMATS[name], [text[:end]], holds=True)
        whole = [(called, json.loads(arguments)) for called, arguments in found]
        assert whole == calls[: len(whole)]
        assert content in text


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_form_is_found_in_the_template(name: str) -> None:
    found = find_format(TEMPLATES[name])
    assert found and found.name == name


@pytest.mark.parametrize("are_tokens", [True, False], ids=["tags are tokens", "tags are text"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_grammar_admits_the_spelling_and_nothing_else(name: str, are_tokens: bool) -> None:
    form, (text, _) = FORMATS[name], SPELLED[name]
    tags = [AddedToken(tag, special=tag[0] == "[", normalized=False) for tag in form.tags]
    tokenizer = tokenizer_with(*tags if are_tokens else ())
    added = added_tokens(tokenizer)
    calls = Constraint("tools", form.grammar(TOOLS, added))
    assert follows(tokenizer, calls, text)
    for wrong in (text.replace("3", "three", 1), text.replace("get_weather", "other"), text[:-3], "Hello", ""):
        assert not follows(tokenizer, calls, wrong), wrong
    if form.can_be_free(added):
        free = Constraint("tools", form.grammar(Tools(TOOLS.definitions), added, free=True))
        for allowed in (text, "", "Hello.", f"Hello.{text}"):
            assert follows(tokenizer, free, allowed), allowed
        assert not follows(tokenizer, free, f"Hello.{text.replace('3', 'three', 1)}")


def test_ids_are_those_that_templates_want() -> None:
    assert FORMATS["kimi_k2"].make_id("now", 2) == "functions.now:2"
    assert len(FORMATS["mistral"].make_id("now", 0)) == 9 and FORMATS["mistral"].make_id("now", 0).isalnum()
    assert FORMATS["hermes"].make_id("now", 0).startswith("call_")


@pytest.mark.parametrize("name", FORMATS)
def test_a_beginning_without_end_is_not_held_for_ever(name: str) -> None:
    """A name of thousands of letters, say: it is text after a while, unless a call has begun."""
    text, _ = SPELLED[name]
    for place in range(1, len(text) // 2, 5):
        parser = ToolCallParser(ExpectedCalls(FORMATS[name], True, schemas=TOOLS.schemas()), True)
        seen = [parser.push(text[:place]), *(parser.push("a" * 100) for _ in range(30))]
        assert gather(seen)[0] or parser._candidate, text[:place]


@pytest.mark.parametrize("name", ["function_gemma", "pythonic", "qwen3_coder"])
def test_any_of_the_optional_arguments_may_be_left_out(name: str) -> None:
    """The first as well; and what is no schema has no arguments."""
    form, (tokenizer, added) = FORMATS[name], (tokenizer_with(), added_tokens(tokenizer_with()))
    texts = {
        "function_gemma": "<start_function_call>call:f{b:2}<end_function_call>",
        "pythonic": "[f(b=2)]",
        "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=b>\n2\n</parameter>\n</function>\n</tool_call>",
    }
    integer = {"type": "integer"}
    for parameters, admits in (
        ({"properties": {"a": integer, "b": integer, "c": integer}}, True),
        ({"properties": {"b": integer}, "required": ["b"]}, True),
        ({"properties": {"a": integer, "b": integer}, "required": ["a"]}, False),
        ({"properties": [1], "required": 5}, False),
    ):
        tools = Tools([{"type": "function", "function": {"name": "f", "parameters": parameters}}], must_call=("f",))
        assert follows(tokenizer, Constraint("tools", form.grammar(tools, added)), texts[name]) == admits, parameters
