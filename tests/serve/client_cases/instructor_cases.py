"""instructor: objects of pydantic's classes, in every way in which it asks OpenAI's servers for them."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import instructor
import openai
import pytest
from instructor import Mode
from pydantic import BaseModel

from tests.serve.client_cases import BASE, CITIES, ENDS, KEY

ASK: dict[str, Any] = {"model": "target", "messages": [{"role": "user", "content": "a city"}], "max_retries": 0}
ASK |= {"max_tokens": 300, "extra_body": ENDS}


class City(BaseModel):
    name: Literal["Paris", "Rome"]


def client(mode: Mode) -> Any:
    return instructor.from_openai(openai.OpenAI(base_url=BASE, api_key=KEY, max_retries=0), mode=mode)


@pytest.mark.parametrize("mode", [Mode.JSON_SCHEMA, Mode.TOOLS, Mode.TOOLS_STRICT])
def test_an_object(mode: Mode) -> None:
    found = client(mode).chat.completions.create(response_model=City, **ASK)
    assert isinstance(found, City) and found.name in CITIES


def test_an_object_of_a_response() -> None:
    ask = {key: value for key, value in ASK.items() if key not in ("messages", "max_tokens")}
    found = client(Mode.RESPONSES_TOOLS).responses.create(
        input="a city", response_model=City, max_output_tokens=300, **ask
    )
    assert isinstance(found, City) and found.name in CITIES


@pytest.mark.parametrize("mode", [Mode.JSON_SCHEMA, Mode.TOOLS])
def test_an_object_that_grows(mode: Mode) -> None:
    *parts, last = client(mode).chat.completions.create_partial(response_model=City, **ASK)
    assert parts and last.name in CITIES


def test_an_asynchronous_client() -> None:
    made = instructor.from_openai(openai.AsyncOpenAI(base_url=BASE, api_key=KEY), mode=Mode.JSON_SCHEMA)
    found = asyncio.run(made.chat.completions.create(response_model=City, **ASK))
    assert isinstance(found, City)


def test_the_whole_answer_comes_too() -> None:
    found, answer = client(Mode.JSON_SCHEMA).chat.completions.create_with_completion(response_model=City, **ASK)
    assert City.model_validate_json(answer.choices[0].message.content).name == found.name
    assert answer.usage.completion_tokens > 4
