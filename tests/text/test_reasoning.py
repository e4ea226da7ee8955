"""Thoughts are told from answers however a text is cut, and a constraint holds behind them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tokenizers import AddedToken, Tokenizer

from specrun.errors import RequestError
from specrun.text.grammar import Constraint
from specrun.text.reasoning import FORMATS, ReasoningParser, Thought, find_reasoning
from tests.helpers.constraints import added_tokens, follows, tokenizer_with
from tests.text.test_tool_calls import splits

THINK = FORMATS["think"]
Case = tuple[str, bool, str, str, str]
CASES: list[Case] = [
    ("think", False, "<think>\nhm, 2 < 3\n</think>\n\nYes.", "hm, 2 < 3", "Yes."),
    ("think", False, "\n<think>hm</think>Yes.\n", "hm", "Yes.\n"),
    ("think", False, "Yes. <think>no</think>", "", "Yes. <think>no</think>"),
    ("think", False, "<think>", "", ""),
    ("think", False, "<thin", "", "<thin"),
    ("think", False, "<think>cut off </th", "cut off </th", ""),
    ("think", False, "", "", ""),
    ("think", False, "\n\nYes.", "", "Yes."),
    ("think", True, "a </b> c\n\n</think>\n\n{}", "a </b> c", "{}"),
    ("think", True, "never ends", "never ends", ""),
    ("think", True, "</think>Yes </think>", "", "Yes </think>"),
    ("mistral", False, "[THINK]hm[/THINK]Yes.", "hm", "Yes."),
    ("seed_oss", False, "<seed:think>hm</seed:think>Yes.", "hm", "Yes."),
    ("command", True, "hm<|END_THINKING|><x>", "hm", "<x>"),
    ("granite", False, "Here is my thought process:\n\nhm\n\nHere is my response:\n\nYes.", "hm", "Yes."),
    ("harmony", False, "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
     "hm", "Yes."),
    ("harmony", False, "<|channel|>final<|message|>Yes.", "", "Yes."),
    ("harmony", False, "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>"
     "<|start|>assistant<|channel|>final <|constrain|>json<|message|>{}", "ab", "{}"),
    ("harmony", False, "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary "
     "to=functions.f <|constrain|>json<|message|>{}", "a",
     "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}"),
]  # fmt: skip
"""A form, whether the prompt has begun the thought, a text, its thought and its answer."""
TEMPLATES = {
    "think": "{%- set content = content.split('</think>')[-1] %}",
    "mistral": "[THINK]{{ block }}[/THINK]",
    "seed_oss": "<seed:think>",
    "command": "<|START_THINKING|>{{ message.tool_plan }}<|END_THINKING|>",
    "granite": "Write 'Here is my thought process:' before it",
    "harmony": "<|channel|>analysis<|message|>",
}


def parse(thought: Thought, parts: Sequence[str]) -> tuple[str, str]:
    parser = ReasoningParser(thought)
    seen = [*(parser.push(part) for part in parts), parser.push("", ended=True)]
    return "".join(one.reasoning for one in seen), "".join(one.content for one in seen)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}: {case[2][:30]!r}")
def test_thoughts_are_found_however_a_text_is_cut(case: Case) -> None:
    form, is_open, text, reasoning, content = case
    for parts in splits(text):
        assert parse(Thought(FORMATS[form], is_open), parts) == (reasoning, content), parts


def test_thoughts_arrive_as_they_are_written() -> None:
    parser, text = ReasoningParser(Thought(THINK, True)), "one two</think>three"
    seen = [parser.push(character) for character in text]
    assert [one.reasoning for one in seen[:3]] == ["o", "n", "e"]
    assert [one.content for one in seen[-3:]] == ["r", "e", "e"]


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_form_is_found_in_the_template(name: str) -> None:
    found = find_reasoning(TEMPLATES[name])
    assert found and found.name == name


def test_every_form_has_a_case_and_templates_without_one_have_none() -> None:
    assert {case[0] for case in CASES} == FORMATS.keys() == TEMPLATES.keys()
    assert find_reasoning("{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}") is None


def test_the_prompt_says_whether_a_thought_follows() -> None:
    assert THINK.behind("<|im_start|>assistant\n") == Thought(THINK, False)
    assert THINK.behind("<|im_start|>assistant\n<think>\n") == Thought(THINK, True)
    assert THINK.behind("<|im_start|>assistant\n<think>\n\n</think>\n\n") is None


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return tokenizer_with(*(AddedToken(text, special=False) for text in ("<think>", "</think>")))


ANSWERS: list[tuple[Constraint, str, str]] = [
    (Constraint("json_schema", '{"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}'),
     '{"a": 3}', '{"a": "x"}'),
    (Constraint("json_object", ""), '{"b": [1]}', "[1]"),
    (Constraint("regex", "[ab]+"), "abba", "abc"),
    (Constraint("choice", '["yes", "no"]'), "no", "perhaps"),
    (Constraint("grammar", 'start: "x" other\nother: "y"'), "xy", "x"),
]  # fmt: skip


@pytest.mark.parametrize("answer", ANSWERS, ids=lambda answer: answer[0].kind)
def test_a_constraint_holds_behind_the_thought(tokenizer: Tokenizer, answer: tuple[Constraint, str, str]) -> None:
    constraint, right, wrong = answer
    added = added_tokens(tokenizer)
    optional = constraint._replace(before=Thought(THINK, False).grammar(added, True))
    opened = constraint._replace(before=Thought(THINK, True).grammar(added, True))
    as_text = constraint._replace(before=Thought(THINK, True).grammar({}, True))
    for one, thoughts in (
        (optional, ("", "<think>the cat</think>", f"<think>\n{wrong} {{</think>\n\n")),
        (opened, ("</think>", f"{right} {wrong}\n</think>\n\n")),
        (as_text, ("the cat\n</think>\n\n",)),
    ):
        plain = tokenizer_with() if one is as_text else tokenizer
        for thought in thoughts:
            assert follows(plain, one, thought + right), thought
            assert not follows(plain, one, thought + wrong), thought
    assert not follows(tokenizer, opened, right)
    assert not follows(tokenizer, optional, "<think>the cat")


def test_a_thought_may_have_a_limit(tokenizer: Tokenizer) -> None:
    added = added_tokens(tokenizer)
    limited = Constraint("choice", '["no"]', Thought(THINK, True).grammar(added, True, max_tokens=4))
    assert follows(tokenizer, limited, "abc</think>no") and follows(tokenizer, limited, "abcd</think>no")
    assert not follows(tokenizer, limited, "abcde</think>no")
    with pytest.raises(RequestError, match="max_reasoning_tokens: the tokenizer has no token for '</think>'"):
        Thought(THINK, True).grammar({}, True, max_tokens=4)
