"""litellm: chats, completions, responses and Anthropic's messages, with tools and streams."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import litellm
import pytest

from tests.serve.client_cases import BASE, CITIES, ENDS, KEY, PROMPT, URL, answer, chat_text

litellm.suppress_debug_info = True
HELLO = [{"role": "user", "content": PROMPT}]
ASK: dict[str, Any] = {"model": "openai/target", "api_base": BASE, "api_key": KEY}
CHAT: dict[str, Any] = {**ASK, "messages": HELLO, "max_tokens": 12, "temperature": 0}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
LONG: dict[str, Any] = {**ASK, "messages": HELLO, "max_tokens": 200, "extra_body": ENDS}
CALL: dict[str, Any] = {**LONG, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}


def test_a_chat() -> None:
    found = litellm.completion(**CHAT)
    assert found.choices[0].message.content == chat_text(temperature=0, max_tokens=12)
    assert found.choices[0].finish_reason == "length" and found.usage.completion_tokens == 12


def test_a_streamed_chat() -> None:
    chunks = list(litellm.completion(**CHAT, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == chat_text(temperature=0, max_tokens=12)
    assert litellm.stream_chunk_builder(chunks, messages=HELLO).usage.completion_tokens == 12


def test_an_asynchronous_stream() -> None:
    async def text() -> str:
        chunks = await litellm.acompletion(**CHAT, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    assert asyncio.run(text()) == chat_text(temperature=0, max_tokens=12)


def test_a_completion() -> None:
    ask = {**ASK, "model": "text-completion-openai/target", "prompt": PROMPT, "temperature": 0, "max_tokens": 12}
    found = litellm.text_completion(**ask)
    plain = answer("completions", {"prompt": PROMPT, "temperature": 0, "max_tokens": 12})
    assert found.choices[0].text == plain["choices"][0]["text"]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_call_and_the_answer(streamed: bool) -> None:
    found = litellm.completion(**CALL, stream=streamed)
    if streamed:
        found = litellm.stream_chunk_builder(list(found), messages=HELLO)
    message = found.choices[0].message
    (call,) = message.tool_calls
    assert call.function.name == "get_weather" and json.loads(call.function.arguments)["city"] in CITIES
    assert found.choices[0].finish_reason == "tool_calls"
    result = {"role": "tool", "tool_call_id": call.id, "content": "sunny"}
    turns = [*HELLO, message.model_dump(exclude_none=True), result]
    last = litellm.completion(**CALL | {"messages": turns, "tool_choice": "auto"})
    assert last.choices[0].message.content and last.usage.prompt_tokens > found.usage.prompt_tokens


def test_json_of_a_schema() -> None:
    schema = {"name": "city", "strict": True, "schema": PARAMETERS}
    form = {"type": "json_schema", "json_schema": schema}
    found = litellm.completion(**LONG, response_format=form)
    assert json.loads(found.choices[0].message.content)["city"] in CITIES


def test_a_thought() -> None:
    more = {"reasoning_effort": "high", "allowed_openai_params": ["reasoning_effort"]}
    found = litellm.completion(**CHAT, **more, extra_body={"max_reasoning_tokens": 4})
    assert found.choices[0].message.reasoning_content


@pytest.mark.parametrize("streamed", [False, True])
def test_a_response(streamed: bool) -> None:
    ask: dict[str, Any] = {"temperature": 0, "max_output_tokens": 16, "input": PROMPT}  # The least that it sends.
    found = litellm.responses(**ASK, **ask, stream=streamed)
    if streamed:
        found = list(found)[-1].response
    assert found.output[0].content[0].text == answer("responses", ask)["output"][0]["content"][0]["text"]


def test_a_response_after_another() -> None:
    ask: dict[str, Any] = {**ASK, "max_output_tokens": 5, "input": PROMPT}
    first = litellm.responses(**ask)
    second = litellm.responses(**ask, previous_response_id=first.id)
    assert second.usage.input_tokens > first.usage.input_tokens


@pytest.mark.parametrize("streamed", [False, True])
def test_anthropics_messages(streamed: bool) -> None:
    ask = {**CHAT, "model": "anthropic/target", "api_base": URL, "stream": streamed}
    found = litellm.completion(**ask)
    if streamed:
        found = litellm.stream_chunk_builder(list(found), messages=HELLO)
    assert found.choices[0].message.content == chat_text(temperature=0, max_tokens=12)
