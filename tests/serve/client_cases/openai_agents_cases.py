"""openai-agents: a run calls a function, and answers; with both of the SDK's models."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from openai.types.shared import Reasoning
from pydantic import BaseModel

from tests.serve.client_cases import BASE, CITIES, ENDS, KEY, PROMPT

set_tracing_disabled(True)
CALLS: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}
Kind = Any
MODELS = pytest.mark.parametrize("kind", [OpenAIResponsesModel, OpenAIChatCompletionsModel])


class City(BaseModel):
    name: Literal["Paris", "Rome"]


def agent(kind: Kind, cities: list[str] | None = None, settings: dict[str, Any] | None = None, **more: Any) -> Any:
    """cities: where a function notes those that it is asked for; None: it has no function."""

    def get_weather(city: Literal["Paris", "Rome"]) -> str:
        """The weather of a city."""
        assert cities is not None
        cities.append(city)
        return "sunny"

    calls = {} if cities is None else {"tools": [function_tool(get_weather)]}
    chosen = ModelSettings(max_tokens=200, extra_body=ENDS, **({} if cities is None else CALLS), **(settings or {}))
    model = kind("target", AsyncOpenAI(base_url=BASE, api_key=KEY, max_retries=0))
    return Agent(name="agent", instructions="be brief", model=model, model_settings=chosen, **calls, **more)


@MODELS
def test_a_call_and_the_final_answer(kind: Kind) -> None:
    cities: list[str] = []
    result = Runner.run_sync(agent(kind, cities), PROMPT)
    assert [item.type for item in result.new_items] == [
        "tool_call_item",
        "tool_call_output_item",
        "message_output_item",
    ]
    assert len(cities) == 1 and cities[0] in CITIES and result.new_items[1].output == "sunny"
    assert isinstance(result.final_output, str) and result.final_output


@MODELS
def test_a_streamed_run(kind: Kind) -> None:
    cities: list[str] = []

    async def run() -> tuple[list[str], str, str]:
        stream = Runner.run_streamed(agent(kind, cities), PROMPT)
        names, text = [], ""
        async for event in stream.stream_events():
            if event.type == "run_item_stream_event":
                names.append(event.name)
            elif event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                text += event.data.delta
        return names, text, stream.final_output

    names, text, final = asyncio.run(run())
    assert names == ["tool_called", "tool_output", "message_output_created"] and len(cities) == 1
    assert text == final != ""


@MODELS
def test_a_typed_answer(kind: Kind) -> None:
    found = Runner.run_sync(agent(kind, output_type=City), "a city").final_output
    assert isinstance(found, City) and found.name in CITIES


@MODELS
def test_the_next_turn(kind: Kind) -> None:
    first = Runner.run_sync(agent(kind, []), PROMPT)
    turns = [*first.to_input_list(), {"role": "user", "content": "and now?"}]
    second = Runner.run_sync(agent(kind), turns)
    counts = [result.raw_responses[-1].usage.input_tokens for result in (first, second)]
    assert second.final_output and counts[1] > 5, counts


def test_only_what_is_new_is_sent() -> None:
    """``previous_response_id`` brings the rest: the prompt is the same."""
    cities: list[str] = []
    whole = Runner.run_sync(agent(OpenAIResponsesModel, cities), PROMPT)
    short = Runner.run_sync(agent(OpenAIResponsesModel, cities), PROMPT, auto_previous_response_id=True)
    counts = [[one.usage.input_tokens for one in result.raw_responses] for result in (whole, short)]
    assert len(cities) == 2 and counts[0] == counts[1] and len(counts[0]) == 2
    more = Runner.run_sync(agent(OpenAIResponsesModel), "again", previous_response_id=short.last_response_id)
    assert more.raw_responses[0].usage.input_tokens > 20


def test_a_thought_comes_before_the_call() -> None:
    cities: list[str] = []
    thinks = {"reasoning": Reasoning(effort="high"), "extra_body": ENDS | {"max_reasoning_tokens": 6}}
    made = agent(OpenAIResponsesModel, cities)
    made.model_settings = made.model_settings.resolve(ModelSettings(**thinks))
    result = Runner.run_sync(made, PROMPT)
    kinds = [item.type for item in result.new_items]
    assert kinds[:3] == ["reasoning_item", "tool_call_item", "tool_call_output_item"] and len(cities) == 1
