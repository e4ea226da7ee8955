"""Thoughts over HTTP: in fields of their own, whole and streamed, before constrained answers too."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from specrun.decoder import SpeculativeDecoder
from specrun.text.reasoning import ReasoningChoice
from tests.helpers.servers import Server, events, running

THINKING = """
{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content.split('</think>')[-1] }}
{%- if message.reasoning_content %}{{- '<think>' + message.reasoning_content + '</think>' }}{%- endif %}{%- endfor %}
{%- if tools %}{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}{{- '<tool_call>' }}{%- endif %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}
{%- elif reasoning_effort == 'high' %}{{- '<think>high\\n' }}{%- else %}{{- '<think>\\n' }}{%- endif %}
"""
ASK: dict[str, Any] = {
    "model": "target",
    "messages": [{"role": "user", "content": "the cat"}],
    "max_tokens": 40,
    "seed": 3,
}
CHOICE: dict[str, Any] = {"guided_choice": ["cat", "dog"], "max_reasoning_tokens": 6}
Open = Callable[..., SpeculativeDecoder]


@pytest.fixture(scope="module")
def opened(long_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Open:
    """Open the pair with the template, and a tokenizer that has tokens for the tags."""

    def open_(draft: bool = True, reasoning: ReasoningChoice = "auto") -> SpeculativeDecoder:
        root = tmp_path_factory.mktemp("thinking")
        (root / "template").write_text(THINKING)
        content = (long_pair / "special" / "tokenizer.json").read_text()
        content = content.replace('"<|python_tag|>"', '"</think>"').replace('"</tool_call>"', '"<think>"')
        (root / "tokenizer.json").write_text(content)
        return SpeculativeDecoder.open(
            long_pair / "target",
            long_pair / "draft" if draft else None,
            tokenizer_dir=root,
            chat_template=root / "template",
            reasoning_format=reasoning,
        )

    return open_


@pytest.fixture(scope="module")
def server(opened: Open) -> Iterator[Server]:
    with running(opened()) as server:
        yield server


def ask(server: Server, **fields: Any) -> Any:
    answer = server.post("/v1/chat/completions", ASK | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_thought_has_a_field_of_its_own(server: Server) -> None:
    """The prompt has begun it, and a random model does not end it."""
    answer = ask(server)
    (choice,) = answer["choices"]
    assert choice["message"]["reasoning_content"] and choice["message"]["content"] == ""
    usage = answer["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == usage["completion_tokens"] == 40


def test_without_thinking_there_is_none(server: Server) -> None:
    for fields in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
        answer = ask(server, **fields)
        assert "reasoning_content" not in answer["choices"][0]["message"] and answer["choices"][0]["message"]["content"]
        assert answer["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


def test_the_effort_reaches_the_template(server: Server) -> None:
    lengths = [ask(server, **more)["usage"]["prompt_tokens"] for more in ({}, {"reasoning_effort": "high"})]
    assert lengths[0] < lengths[1]


def test_a_constraint_holds_behind_the_thought(server: Server, opened: Open) -> None:
    """And the text is the same without a draft."""
    answer = ask(server, **CHOICE)
    message = answer["choices"][0]["message"]
    assert message["content"] in CHOICE["guided_choice"] and message["reasoning_content"]
    assert 0 < answer["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 7
    with running(opened(draft=False)) as alone:
        assert ask(alone, **CHOICE)["choices"][0]["message"] == message


def test_a_limit_alone_ends_the_thought_and_frees_the_answer(server: Server) -> None:
    answer = ask(server, max_reasoning_tokens=5)
    assert 0 < answer["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 6
    assert answer["choices"][0]["message"]["content"]
    without = ask(server, max_reasoning_tokens=5, reasoning_effort="none")
    assert without["usage"]["completion_tokens_details"]["reasoning_tokens"] == 0


def test_drafts_in_a_thought_with_a_limit(server: Server, opened: Open) -> None:
    """Some of them are taken back."""
    asked = [{"temperature": 1.2, "seed": seed, "max_reasoning_tokens": 25, "draft_len": 3} for seed in range(6)]
    found = [ask(server, **each)["choices"][0]["message"] for each in asked]
    with running(opened(draft=False)) as alone:
        assert found == [ask(alone, **each | {"draft_len": 0})["choices"][0]["message"] for each in asked]


def test_a_required_call_stands_behind_the_thought(server: Server) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": None}}]
    more = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False, "max_reasoning_tokens": 6}
    (choice,) = ask(server, **more, max_tokens=80)["choices"]
    assert choice["message"]["reasoning_content"]
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "f" and choice["finish_reason"] == "tool_calls"


def test_a_stream_is_the_whole_answer(server: Server) -> None:
    """In openai's client too, which keeps fields that it does not know."""
    whole = ask(server, **CHOICE)["choices"][0]["message"]
    chunks = events(server.post("/v1/chat/completions", ASK | CHOICE | {"stream": True}))
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    for name in ("reasoning_content", "content"):
        assert "".join(delta.get(name, "") for delta in deltas) == whole[name]
    places = [place for place, delta in enumerate(deltas) if "reasoning_content" in delta]
    assert max(places) < max(place for place, delta in enumerate(deltas) if delta.get("content"))
    client: Any = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    stream = client.chat.completions.create(**ASK, stream=True, extra_body=CHOICE)
    read = "".join(getattr(chunk.choices[0].delta, "reasoning_content", None) or "" for chunk in stream)
    assert read == whole["reasoning_content"]


def test_answers_go_back_with_their_thoughts(server: Server) -> None:
    turns = [*ASK["messages"], {"role": "assistant", "content": "a", "reasoning_content": "the dog"}, *ASK["messages"]]
    with_it, without = (
        server.post(
            "/tokenize", {"messages": [turn if keep else {**turn, "reasoning_content": None} for turn in turns]}
        )
        for keep in (True, False)
    )
    assert with_it.json()["count"] > without.json()["count"]


def test_the_parser_may_be_switched_off(opened: Open) -> None:
    with running(opened(reasoning="none")) as server:
        message = ask(server)["choices"][0]["message"]
        assert "reasoning_content" not in message and message["content"]
        constrained = ask(server, guided_choice=["cat", "dog"])["choices"][0]["message"]
        assert constrained["content"] in ("cat", "dog")
        assert json.dumps(constrained).count("reasoning") == 0
