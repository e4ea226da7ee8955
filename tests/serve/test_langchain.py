"""LangChain with the Responses API: calls and their results, typed answers, thoughts, and stored conversations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

from tests.helpers.servers import Server, running
from tests.helpers.tool_pairs import open_thinking_pair
from tests.serve.client_cases import CITIES, ENDS


class City(BaseModel):
    """A city."""

    name: Literal["Paris", "Rome"]


class get_weather(BaseModel):
    """The weather of a city."""

    city: Literal["Paris", "Rome"]


@pytest.fixture(scope="module")
def server(long_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(open_thinking_pair(long_pair, tmp_path_factory.mktemp("langchain"))) as server:
        yield server


def model(server: Server, body: dict[str, Any] = ENDS, **more: Any) -> Any:
    settings: dict[str, Any] = {"model": "target", "api_key": "none", "use_responses_api": True, "max_retries": 0}
    return ChatOpenAI(base_url=f"{server.url}/v1", max_tokens=200, extra_body=body, **settings | more)


def called(server: Server, **more: Any) -> Any:
    return model(server, **more).bind_tools(
        [get_weather], tool_choice="get_weather", strict=True, parallel_tool_calls=False
    )


def test_a_call_and_the_answer(server: Server) -> None:
    found = called(server).invoke("the weather")
    (call,) = found.tool_calls
    assert call["name"] == "get_weather" and call["args"]["city"] in CITIES
    result = {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}
    answer = model(server).invoke([{"role": "user", "content": "the weather"}, found, result])
    assert answer.text and not answer.tool_calls
    assert answer.usage_metadata["input_tokens"] > 20


def test_a_streamed_call(server: Server) -> None:
    whole, streamed = called(server).invoke("the weather"), None
    for chunk in called(server).stream("the weather"):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed and [call["args"] for call in streamed.tool_calls] == [call["args"] for call in whole.tool_calls]
    assert streamed.usage_metadata == whole.usage_metadata


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_a_typed_answer(server: Server, method: str) -> None:
    found = model(server).with_structured_output(City, method=method).invoke("a city")
    assert isinstance(found, City) and found.name in CITIES


def test_a_thought(server: Server) -> None:
    thinks: Any = {"body": {**ENDS, "max_reasoning_tokens": 6}, "reasoning": {"effort": "high"}}
    found = called(server, **thinks).invoke("the weather")
    assert [block["type"] for block in found.content_blocks] == ["reasoning", "tool_call"]
    assert found.usage_metadata["output_token_details"]["reasoning"] > 0


def test_only_what_is_new_is_sent(server: Server) -> None:
    """The server has the rest; the prompt is the same."""
    turns: list[Any] = [{"role": "user", "content": "the weather"}]
    first = model(server).invoke(turns)
    turns += [first, {"role": "user", "content": "and now?"}]
    whole, short = (model(server, use_previous_response_id=uses).invoke(turns) for uses in (False, True))
    assert short.usage_metadata["input_tokens"] == whole.usage_metadata["input_tokens"] and short.text == whole.text
    told = server.get(f"/v1/responses/{short.response_metadata['id']}").json()
    assert told["previous_response_id"] == first.response_metadata["id"]
