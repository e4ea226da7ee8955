"""Prompts of megabytes: they are refused before any work is done on them that others would wait for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specrun.decoder import SpeculativeDecoder
from tests.helpers.servers import Server, running

TEXT = "the cat sat on a mat; " * (3 << 20 >> 4)
"""Four megabytes."""
TEMPLATE = "{{ tools }}{% for message in messages %}{{ message.content }}{% endfor %}<tool_call>"


@pytest.fixture(scope="module")
def chats(engines: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a chat template."""
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text(TEMPLATE)
    with running(SpeculativeDecoder.open(engines / "target", chat_template=template)) as server:
        yield server


def tools(text: str) -> list[Any]:
    return [{"type": "function", "function": {"name": "f", "description": text}}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": TEXT}),
        ("/v1/completions", {"prompt": ["a", TEXT]}),
        ("/tokenize", {"prompt": TEXT}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "tools": tools(TEXT)}),
        ("/tokenize", {"messages": [{"role": "user", "content": TEXT}]}),
    ],
    ids=["text", "second text", "tokenize", "chat", "tools", "tokenize chat"],
)
def test_a_text_of_megabytes_is_refused_before_it_is_encoded(chats: Server, path: str, body: Any) -> None:
    answer = chats.post(path, body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["code"] == "context_length_exceeded"
    assert "characters, more than 48 tokens can have, the engine's max_input_len" in error["message"]


def test_a_hundred_thousand_messages_are_refused_before_they_are_read(chats: Server) -> None:
    messages = [{"role": "user", "content": "a"}] * 100_000 + [{"role": "nobody"}]
    for path in ("/v1/chat/completions", "/tokenize"):
        error = chats.post(path, {"messages": messages}).json()["error"]
        assert error["code"] == "context_length_exceeded" and "100001 messages" in error["message"]


def test_millions_of_ids_are_counted_before_they_are_read(chats: Server) -> None:
    error = chats.post("/v1/completions", {"prompt": [1] * 2_800_000 + ["no id"]}).json()["error"]
    assert error["code"] == "context_length_exceeded" and "2800001 tokens" in error["message"]
    for path, name, value, message in (
        ("/v1/completions", "logit_bias", {"no id": 1} | {str(n): 1 for n in range(500_000)}, "500001 tokens"),
        ("/v1/completions", "stop_token_ids", [*range(500_000), "no id"], "500001 ids"),
        ("/v1/completions", "stop", ["a"] * 500_000 + [1], "500001 texts"),
        ("/detokenize", "tokens", [1] * 500_000 + ["no id"], "500001 ids"),
    ):
        answer = chats.post(path, {"prompt": "a", name: value})
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == name and message in error["message"], error
