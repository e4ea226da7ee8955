"""Items of conversations: which of them go where a prompt is too long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from specrun.errors import ContextLengthError
from specrun.openai.response_items import Item, fitting, messages_of, read_items, with_ids


def message(role: str, text: str) -> Item:
    return {"type": "message", "role": role, "content": text}


CONVERSATION: list[Item] = [
    message("developer", "d"),
    message("user", "1"),
    message("assistant", "2"),
    message("system", "s"),
    message("user", "3"),
    {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"},
    {"type": "function_call", "call_id": "b", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "a", "output": "4"},
    {"type": "function_call_output", "call_id": "b", "output": "5"},
    message("assistant", "6"),
]


def at_most(count: int) -> Callable[[Sequence[Item]], bool]:
    return lambda items: len(items) <= count


@pytest.mark.parametrize(
    ("most", "left"),
    [
        (10, range(10)),
        (9, [0, 3, *range(4, 10)]),  # Begins with a user's message.
        (8, [0, 3, *range(4, 10)]),
        (7, [0, 3, *range(5, 10)]),
        (6, [0, 3, 6, 8, 9]),  # No output without its call.
        (5, [0, 3, 6, 8, 9]),
        (4, [0, 3, 9]),
        (3, [0, 3, 9]),
        (1, [0, 3, 9]),  # Never instructions: it does not fit, and that is an error.
    ],
)
def test_the_oldest_items_go_first(most: int, left: Sequence[int]) -> None:
    assert list(fitting(CONVERSATION, at_most(most))) == [CONVERSATION[number] for number in left]


def test_an_error_of_the_length_is_a_no(monkeypatch: pytest.MonkeyPatch) -> None:
    def fits(items: Sequence[Item]) -> bool:
        if len(items) > 8:
            raise ContextLengthError("too long")
        return True

    assert len(fitting(CONVERSATION, fits)) == 8


def test_few_lengths_are_looked_at() -> None:
    """A conversation may have thousands of items."""
    looks: list[int] = []

    def fits(items: Sequence[Item]) -> bool:
        looks.append(len(items))
        return len(items) <= 100

    items = [message("user", str(number)) for number in range(4000)]
    assert len(fitting(items, fits)) == 100 and len(looks) < 15


def test_listed_items_are_the_same_conversation() -> None:
    def find(_: str) -> Item:
        raise AssertionError

    thought = {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "t"}], "id": None}
    given: list[Any] = [{"role": "user", "content": "a"}, thought, {"role": "assistant", "content": "b"}]
    items = [*read_items("input", given, find), *CONVERSATION]
    listed = with_ids(items, "resp_1")
    assert len({item["id"] for item in listed}) == len(items) and listed[1]["id"] == "rs_1_in1"
    assert [item["content"][0]["type"] for item in listed[:3]] == ["input_text", "reasoning_text", "output_text"]

    def texts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [
            {**one, "content": one["content"][0]["text"]} if isinstance(one["content"], list) else one
            for one in messages
        ]

    assert texts(messages_of("input", listed)) == messages_of("input", items)
    assert with_ids(listed, "resp_2") == listed
