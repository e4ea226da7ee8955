"""llama-index: chats and completions, whole and streamed, calls, and typed answers."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import pytest
from llama_index.core.base.llms.types import ChatMessage, MessageRole
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike, OpenAILikeResponses
from pydantic import BaseModel

from tests.serve.client_cases import BASE, CITIES, ENDS, KEY, PROMPT, answer, chat_text

HELLO = [ChatMessage(role=MessageRole.USER, content=PROMPT)]


class City(BaseModel):
    name: Literal["Paris", "Rome"]


class Place(BaseModel):
    city: Literal["Paris", "Rome"]


def get_weather(city: str) -> str:
    """The weather of a city."""
    return f"sunny in {city}"


def model(kind: Any = OpenAILike, max_tokens: int = 12, **more: Any) -> Any:
    settings = {"is_chat_model": True, "is_function_calling_model": True, "max_retries": 0, "context_window": 2048}
    length = {"max_output_tokens" if kind is OpenAILikeResponses else "max_tokens": max_tokens}
    return kind(model="target", api_base=BASE, api_key=KEY, **settings | length | more)


@pytest.mark.parametrize("kind", [OpenAILike, OpenAILikeResponses])
def test_a_chat(kind: Any) -> None:
    expected = chat_text(temperature=0, max_tokens=12)
    assert model(kind, temperature=0).chat(HELLO).message.content == expected
    parts = list(model(kind, temperature=0).stream_chat(HELLO))
    assert "".join(part.delta or "" for part in parts) == expected


def test_asynchronous_chats() -> None:
    async def texts() -> tuple[Any, str]:
        whole = await model(temperature=0).achat(HELLO)
        parts = await model(temperature=0).astream_chat(HELLO)
        return whole.message.content, "".join([part.delta or "" async for part in parts])

    expected = chat_text(temperature=0, max_tokens=12)
    assert asyncio.run(texts()) == (expected, expected)


def test_a_completion() -> None:
    made = model(temperature=0, is_chat_model=False)
    expected = answer("completions", {"prompt": PROMPT, "temperature": 0, "max_tokens": 12})["choices"][0]["text"]
    assert made.complete(PROMPT).text == expected
    assert "".join(part.delta or "" for part in made.stream_complete(PROMPT)) == expected


def test_log_probabilities() -> None:
    found = model(temperature=0, logprobs=True, top_logprobs=2).chat(HELLO)
    assert len(found.logprobs) == 12 and all(len(top) == 2 for top in found.logprobs)


def test_a_function_is_called() -> None:
    made = model(max_tokens=200, additional_kwargs={"extra_body": ENDS})
    tool = FunctionTool.from_defaults(get_weather, fn_schema=Place)
    found = made.chat_with_tools([tool], PROMPT, tool_required=True, allow_parallel_tool_calls=False)
    (call,) = made.get_tool_calls_from_response(found)
    assert call.tool_name == "get_weather" and call.tool_kwargs["city"] in CITIES
    result = ChatMessage(role=MessageRole.TOOL, content="sunny", additional_kwargs={"tool_call_id": call.tool_id})
    assert made.chat([*HELLO, found.message, result]).message.content
    done = made.predict_and_call([tool], PROMPT, tool_required=True, allow_parallel_tool_calls=False)
    assert done.response.startswith("sunny in")


def test_a_typed_answer() -> None:
    made = model(max_tokens=200, additional_kwargs={"extra_body": ENDS}).as_structured_llm(City)
    found = made.complete("a city").raw
    assert isinstance(found, City) and found.name in CITIES
