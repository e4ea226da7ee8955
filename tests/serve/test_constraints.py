"""Constrained answers over HTTP: every one is valid, and the same with and without the draft."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from tests.helpers.servers import Server

SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["cat", "dog"]}},
    "required": ["ok", "kind"],
    "additionalProperties": False,
}
CHAT = {"messages": [{"role": "user", "content": "the cat"}], "max_tokens": 70}


@pytest.mark.parametrize("seed", range(3))
def test_json_of_a_schema_is_valid_and_the_same_with_and_without_the_draft(server: Server, seed: int) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": SCHEMA}}
    texts = set()
    for draft_len in (0, 4):
        body = {**CHAT, "seed": seed, "draft_len": draft_len, "response_format": wanted}
        (choice,) = server.post("/v1/chat/completions", body).json()["choices"]
        assert choice["finish_reason"] == "stop"
        jsonschema.validate(json.loads(choice["message"]["content"]), SCHEMA)
        texts.add(choice["message"]["content"])
    assert len(texts) == 1


def test_choices_and_expressions(server: Server) -> None:
    body = {"prompt": "the cat", "max_tokens": 20, "n": 6, "seed": 0}
    answer = server.post("/v1/completions", {**body, "guided_choice": ["yes", "no"]}).json()
    assert {choice["text"] for choice in answer["choices"]} == {"yes", "no"}
    answer = server.post("/v1/completions", {**body, "guided_regex": "[ab]{3}"}).json()
    assert all(len(choice["text"]) == 3 and set(choice["text"]) <= {"a", "b"} for choice in answer["choices"])


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "hiccup"}}}},
        {"guided_regex": "("},
        {"guided_grammar": "start: MISSING"},
        {"guided_choice": "yes", "guided_regex": "no"},
    ],
)
def test_a_bad_constraint_is_the_clients_mistake(server: Server, fields: dict[str, Any]) -> None:
    answer = server.post("/v1/completions", {"prompt": "the cat", "max_tokens": 4, **fields})
    assert answer.status_code == 400 and answer.json()["error"]["param"]
    assert server.get("/health").status_code == 200
