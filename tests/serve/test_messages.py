"""The Messages API, as Anthropic's client uses it: the answers are those of chats."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest

from specrun.decoder import SpeculativeDecoder
from specrun.serve.keys import ApiKey
from tests.helpers.servers import Server, running
from tests.helpers.tool_pairs import QWEN, open_thinking_pair

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [{"name": "get_weather", "description": "The weather", "input_schema": SCHEMA}]
HELLO: list[Any] = [{"role": "user", "content": "the weather"}]
ASK: dict[str, Any] = {"model": "target", "messages": HELLO, "max_tokens": 200}
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 6}
SHORT: dict[str, Any] = {"max_tokens": 6, "extra_body": {"temperature": 0}}
"""The same for the client, which knows no temperature."""
TURN = "{% if enable_thinking %}{{- '<think>\\n' }}{% else %}{{- '<think>\\n\\n</think>\\n' }}{% endif %}"


@pytest.fixture(scope="module")
def opened(long_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SpeculativeDecoder]:
    """A model that thinks where it is asked to."""
    with open_thinking_pair(long_pair, tmp_path_factory.mktemp("messages"), QWEN + TURN) as decoder:
        yield decoder


@pytest.fixture(scope="module")
def server(opened: SpeculativeDecoder) -> Iterator[Server]:
    with running(opened) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    return anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)


@pytest.mark.parametrize("field", ["output_config", "output_format"])
def test_a_format_holds(client: Any, field: str) -> None:
    """And wrong ones are refused, not ignored."""
    form: dict[str, Any] = {"type": "json_schema", "schema": SCHEMA}
    asked = {"output_config": {"format": form, "effort": "max"}} if field == "output_config" else {field: form}
    (text,) = client.messages.create(**ASK, extra_body={"temperature": 0, **asked}).content
    assert json.loads(text.text)["city"] in ("Paris", "Rome")
    with pytest.raises(anthropic.BadRequestError, match="expected json_schema"):
        client.messages.create(**ASK, extra_body={"output_config": {"format": {"type": "xml"}}})


def test_a_message_is_the_chats_answer(client: Any, server: Server) -> None:
    found = client.messages.create(**ASK | SHORT, system=[{"type": "text", "text": "be brief"}])
    messages = [{"role": "system", "content": "be brief"}, *HELLO]
    chat = server.post("/v1/chat/completions", {"messages": messages, **GREEDY}).json()
    (text,) = found.content
    assert text.text == chat["choices"][0]["message"]["content"] and found.stop_reason == "max_tokens"
    counts = found.usage
    assert counts.input_tokens + counts.cache_read_input_tokens == chat["usage"]["prompt_tokens"]
    assert counts.output_tokens == 6 and (found.type, found.role, found.model) == ("message", "assistant", "target")
    counted = client.messages.count_tokens(model="target", messages=HELLO, system="be brief")
    assert counted.input_tokens == chat["usage"]["prompt_tokens"]


def test_a_call_is_a_block_and_its_result_goes_back(client: Any, server: Server) -> None:
    found = client.messages.create(**ASK, tools=TOOLS, tool_choice={"type": "tool", "name": "get_weather"})
    (call,) = found.content
    assert (call.type, call.name, found.stop_reason) == ("tool_use", "get_weather", "tool_use")
    assert call.input["city"] in ("Paris", "Rome")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "sunny"}]}
    turns: list[Any] = [
        *HELLO,
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}, call.model_dump()]},
        {"role": "user", "content": [result, {"type": "text", "text": "and now?"}]},
    ]
    shown = {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": json.dumps(call.input)}}
    messages = [
        *HELLO,
        {"role": "assistant", "content": "I look.", "tool_calls": [shown]},
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
        {"role": "user", "content": "and now?"},
    ]
    function = {"name": "get_weather", "parameters": SCHEMA, "description": "The weather"}
    chat = {"messages": messages, "tools": [{"type": "function", "function": function}], **GREEDY}
    same = server.post("/v1/chat/completions", chat).json()
    answer = client.messages.create(**ASK | SHORT | {"messages": turns}, tools=TOOLS)
    assert answer.content[0].text == same["choices"][0]["message"]["content"]


@pytest.mark.parametrize("thinks", [True, False])
def test_a_stream_is_the_whole_message(client: Any, thinks: bool) -> None:
    """A thought of any length, and the call behind it."""
    ask = {**ASK, "tools": TOOLS, "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
    ask["thinking"] = {"type": "enabled", "budget_tokens": 6} if thinks else {"type": "disabled"}
    ask["extra_body"] = {"seed": 3}
    whole = client.messages.create(**ask)
    assert [part.type for part in whole.content] == ["thinking"] * thinks + ["tool_use"]
    with client.messages.stream(**ask) as stream:
        events = list(stream)
        last = stream.get_final_message()
    assert last.content[-1].input == whole.content[-1].input and last.stop_reason == whole.stop_reason == "tool_use"
    assert last.usage.output_tokens == whole.usage.output_tokens
    if thinks:
        assert last.content[0].thinking == whole.content[0].thinking != ""
    kinds = [event.type for event in events if event.type in {"message_start", "content_block_start", "message_stop"}]
    assert kinds == ["message_start", *["content_block_start"] * (1 + thinks), "message_stop"]


def test_a_stop_sequence_is_told(client: Any) -> None:
    """Whole and streamed; not where another end comes first."""
    sampled: dict[str, Any] = {**ASK, "max_tokens": 12, "extra_body": {"seed": 3}}
    whole = client.messages.create(**sampled)
    text = whole.content[0].text
    stop = next(
        text[place : place + 2] for place in range(1, len(text)) if text.index(text[place : place + 2]) == place
    )
    ask = {**sampled, "stop_sequences": ["never", stop]}
    found = client.messages.create(**ask)
    assert (found.stop_reason, found.stop_sequence) == ("stop_sequence", stop)
    assert found.content[0].text == text.partition(stop)[0]
    with client.messages.stream(**ask) as stream:
        last = stream.get_final_message()
    assert (last.stop_reason, last.stop_sequence) == ("stop_sequence", stop)
    assert (whole.stop_reason, whole.stop_sequence) == ("max_tokens", None)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("max_tokens", None, "max_tokens: missing"),
        ("max_tokens", 0, "max_tokens 0"),
        ("messages", [], "messages"),
        ("messages", [{"role": "system", "content": "a"}], "messages[0].role"),
        ("messages", [{"role": "user", "content": [{"type": "image"}]}], "messages[0].content[0].type"),
        ("system", 5, "system"),
        ("tools", [{"type": "web_search_20250305", "name": "w"}], "tools[0].type"),
        ("tool_choice", {"type": "some"}, "tool_choice.type"),
        ("temperature", -1, "temperature"),
        ("stop_sequences", [""], "stop"),
        ("model", "claude", "claude"),
    ],
)
def test_errors_have_anthropics_shape(server: Server, field: str, value: Any, said: str) -> None:
    body = {**ASK, "tools": TOOLS} | {field: value}
    answer = server.post("/v1/messages", body)
    told = answer.json()
    assert answer.status_code in (400, 404) and told["type"] == "error" and said in told["error"]["message"], told
    assert told["error"]["type"] in ("invalid_request_error", "not_found_error")


def test_the_clients_key_is_taken(long_pair: Path, tmp_path: Path) -> None:
    with (
        open_thinking_pair(long_pair, tmp_path, QWEN + TURN) as decoder,
        running(decoder, keys=(ApiKey(b"secret"),)) as server,
    ):
        for key, status in (("secret", 200), ("other", 401)):
            answer = server.post("/v1/messages", {**ASK, **GREEDY}, headers={"x-api-key": key})
            assert answer.status_code == status
