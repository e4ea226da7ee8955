"""The Responses API with tools and thoughts, as OpenAI's client uses it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.helpers.servers import Server, running
from tests.helpers.tool_pairs import open_thinking_pair

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "name": "get_weather", "parameters": PARAMETERS, "strict": True},
    {"type": "function", "name": "now", "parameters": None},
]
ASK: dict[str, Any] = {"model": "target", "input": "the weather", "max_output_tokens": 200, "tools": TOOLS}
NAMED: Any = {"type": "function", "name": "get_weather"}


@pytest.fixture(scope="module")
def server(long_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(open_thinking_pair(long_pair, tmp_path_factory.mktemp("responses"))) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_a_call_is_an_item_and_its_output_goes_back(client: Any, server: Server) -> None:
    """The same prompt as that of the chat."""
    found = client.responses.create(**ASK, tool_choice=NAMED)
    (call,) = found.output
    assert (call.type, call.name, call.status) == ("function_call", "get_weather", "completed")
    assert json.loads(call.arguments)["city"] in ("Paris", "Rome") and found.status == "completed"
    assert found.tool_choice.type == "function" and [tool.name for tool in found.tools] == ["get_weather", "now"]
    turns = [
        {"role": "user", "content": "the weather"},
        call.model_dump(),
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
    ]
    answer = client.responses.create(**{**ASK, "input": turns, "max_output_tokens": 5, "temperature": 0})
    shown = {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
    messages = [
        turns[0],
        {"role": "assistant", "content": None, "tool_calls": [shown]},
        {"role": "tool", "tool_call_id": call.call_id, "content": "sunny"},
    ]
    tools = [{"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}} for tool in TOOLS]
    chat = {"model": "target", "messages": messages, "tools": tools, "max_tokens": 5, "temperature": 0}
    same = server.post("/v1/chat/completions", chat).json()
    assert answer.usage.input_tokens == same["usage"]["prompt_tokens"]
    assert answer.output_text == same["choices"][0]["message"]["content"]


def test_a_stream_has_every_event_of_a_call(client: Any) -> None:
    ask = {**ASK, "tool_choice": "required", "parallel_tool_calls": False, "extra_body": {"seed": 3}}
    whole = client.responses.create(**ask)
    events = list(client.responses.create(**ask, stream=True))
    assert [*dict.fromkeys(event.type for event in events)] == [
        *("response.created", "response.in_progress", "response.output_item.added"),
        *("response.function_call_arguments.delta", "response.function_call_arguments.done"),
        *("response.output_item.done", "response.completed"),
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    (call,) = whole.output
    parts = [event for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(event.delta for event in parts) == call.arguments
    (last,) = events[-1].response.output
    assert (last.name, last.arguments) == (call.name, call.arguments) and last.id == parts[0].item_id


def test_a_thought_is_an_item_before_the_answer(client: Any) -> None:
    ask: dict[str, Any] = {**ASK, "reasoning": {"effort": "high"}, "tool_choice": NAMED}
    more = {"extra_body": {"max_reasoning_tokens": 6, "seed": 4}}
    whole = client.responses.create(**ask, **more)
    thought, call = whole.output
    assert (thought.type, call.type) == ("reasoning", "function_call") and thought.content[0].text
    assert 0 < whole.usage.output_tokens_details.reasoning_tokens <= 7 and whole.reasoning.effort == "high"
    events = list(client.responses.create(**ask, **more, stream=True))
    assert [*dict.fromkeys(event.type for event in events)][2:7] == [
        *("response.output_item.added", "response.content_part.added", "response.reasoning_text.delta"),
        *("response.reasoning_text.done", "response.content_part.done"),
    ]
    text = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
    assert text == thought.content[0].text == events[-1].response.output[0].content[0].text
    assert [event.output_index for event in events if event.type == "response.output_item.added"] == [0, 1]
    turns = [{"role": "user", "content": "a"}, *(item.model_dump() for item in whole.output)]
    assert client.responses.create(**{**ASK, "input": turns, "max_output_tokens": 2}).status == "incomplete"


def test_an_answer_without_a_call_is_a_message(client: Any) -> None:
    ask = {
        **ASK,
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "now"}]},
    }
    found = client.responses.create(**{**ask, "max_output_tokens": 4, "temperature": 0})
    assert [item.type for item in found.output] == ["message"] and found.status == "incomplete"


@pytest.mark.parametrize("kind", ["text", "call", "thought and call", "thought and text"])
def test_log_probabilities_are_of_the_texts_tokens(client: Any, kind: str) -> None:
    """Neither of a thought's nor of a call's, whole and streamed."""
    ask: dict[str, Any] = {**ASK, "include": ["message.output_text.logprobs"]}
    ask |= {"max_output_tokens": 200 if "call" in kind else 20, "tool_choice": NAMED if "call" in kind else "none"}
    ask |= {"reasoning": {"effort": "high" if "thought" in kind else "low"}}
    ask["extra_body"] = {"max_reasoning_tokens": 6, "seed": 4}
    whole = client.responses.create(**ask)
    events = list(client.responses.create(**ask, stream=True))
    kinds = ["reasoning"] * ("thought" in kind) + ["function_call" if "call" in kind else "message"]
    assert [item.type for item in whole.output] == kinds == [item.type for item in events[-1].response.output]
    if "text" in kind:
        part = whole.output[-1].content[0]
        spelt = b"".join(bytes(score.bytes) for score in part.logprobs).decode(errors="replace")
        assert spelt.endswith(part.text) and len(part.text) > 5 and len(spelt) < len(part.text) + 8
        told = [
            score.token for event in events if event.type == "response.output_text.delta" for score in event.logprobs
        ]
        assert told == [score.token for score in part.logprobs]
