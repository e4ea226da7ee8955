"""pydantic-ai: typed answers by calls and by schemas, tools, streams and thoughts; with both of OpenAI's APIs."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent, ModelSettings, NativeOutput, ThinkingPart, ToolOutput
from pydantic_ai.capabilities import PrepareOutputTools
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.serve.client_cases import BASE, CITIES, ENDS, KEY, PROMPT, chat_text

MODELS = pytest.mark.parametrize("kind", [OpenAIChatModel, OpenAIResponsesModel])


class City(BaseModel):
    name: Literal["Paris", "Rome"]


def agent(kind: Any, body: dict[str, Any] = ENDS, max_tokens: int = 200, **more: Any) -> Any:
    model = kind("target", provider=OpenAIProvider(base_url=BASE, api_key=KEY))
    settings = ModelSettings(max_tokens=max_tokens, extra_body=body, parallel_tool_calls=False)
    return Agent(model, model_settings=settings, retries=0, **more)


@MODELS
def test_a_text(kind: Any) -> None:
    found = agent(kind, {"temperature": 0}, 12).run_sync(PROMPT)
    assert found.output == chat_text(temperature=0, max_tokens=12) and found.usage.output_tokens == 12


@MODELS
def test_a_streamed_text(kind: Any) -> None:
    async def text() -> str:
        async with agent(kind, {"temperature": 0}, 12).run_stream(PROMPT) as stream:
            return "".join([part async for part in stream.stream_text(delta=True)])

    assert asyncio.run(text()) == chat_text(temperature=0, max_tokens=12)


@MODELS
@pytest.mark.parametrize("form", [ToolOutput, NativeOutput])
def test_a_typed_answer(kind: Any, form: Any) -> None:
    """By a call that must be, or by a schema."""
    found = agent(kind, output_type=form(City)).run_sync("a city").output
    assert isinstance(found, City) and found.name in CITIES


@MODELS
def test_a_tool_and_a_typed_answer(kind: Any) -> None:
    """A random model would call on and on: it has one function for each turn."""
    cities: list[str] = []

    async def answers(_: Any, tools: list[Any]) -> list[Any]:
        return tools if cities else []

    async def asks(_: Any, tool: Any) -> Any:
        return None if cities else tool

    made = agent(kind, output_type=ToolOutput(City), capabilities=[PrepareOutputTools(answers)])

    def get_weather(city: Literal["Paris", "Rome"]) -> str:
        """The weather of a city."""
        cities.append(city)
        return "sunny"

    made.tool_plain(prepare=asks)(get_weather)
    found = made.run_sync(PROMPT)
    parts = [part for message in found.all_messages() for part in message.parts]
    assert [part.tool_name for part in parts if part.part_kind == "tool-call"] == ["get_weather", "final_result"]
    assert len(cities) == 1 and found.output.name in CITIES


@MODELS
def test_the_next_turn(kind: Any) -> None:
    first = agent(kind, output_type=ToolOutput(City)).run_sync("a city")
    second = agent(kind).run_sync("and another", message_history=first.all_messages())
    assert second.usage.input_tokens > 20 and isinstance(second.output, str)


@MODELS
def test_a_thought(kind: Any) -> None:
    """Of a model that is asked for an effort. OpenAI gives summaries; here the text itself is the content."""
    body: dict[str, Any] = {**ENDS, "max_reasoning_tokens": 6}
    body |= {"reasoning": {"effort": "high"}} if kind is OpenAIResponsesModel else {"reasoning_effort": "high"}
    found = agent(kind, body, output_type=ToolOutput(City)).run_sync("a city")
    parts = [part for message in found.all_messages() for part in message.parts]
    (thought,) = [part for part in parts if isinstance(part, ThinkingPart)]
    text = thought.provider_details["raw_content"][0] if kind is OpenAIResponsesModel else thought.content
    assert text and found.output.name in CITIES
