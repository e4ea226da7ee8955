"""The description says what the server takes."""

from __future__ import annotations

import re
from typing import Any

import jsonschema
import pytest

from specrun.openai.fields import Fields
from specrun.sampling.sampler import SamplingParams
from specrun.serve.keys import ApiKey
from specrun.serve.large_body import _READERS
from specrun.serve.openapi import bodies
from tests.helpers.servers import Server, running

MESSAGES = [{"role": "user", "content": "a"}]
LEAST: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/responses": {"input": "a"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
}


@pytest.mark.parametrize("path", LEAST)
def test_the_fields_are_those_that_bodies_are_read_for(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Responses and messages are read as chats at last, and take their fields as well."""
    asked: set[str] = set()
    take, pop = Fields.take, Fields.pop

    def taken(fields: Fields, name: str, check: Any) -> Any:
        asked.update([] if fields._prefix else [name])
        return take(fields, name, check)

    def popped(fields: Fields, name: str) -> Any:
        asked.update([] if fields._prefix else [name])
        return pop(fields, name)

    monkeypatch.setattr(Fields, "take", taken)
    monkeypatch.setattr(Fields, "pop", popped)
    _READERS[path](LEAST[path], SamplingParams(), None)
    described = set(bodies()[path]["properties"])
    assert described - asked == set()
    if path not in ("/v1/responses", "/v1/messages"):
        assert asked - described <= {"echo"}, "chats refuse it"


def test_every_path_is_described_and_answers(server: Server) -> None:
    description = server.get("/openapi.json").json()
    assert description["openapi"] == "3.1.0"
    for path, methods in description["paths"].items():
        for method, told in methods.items():
            assert len(told["summary"]) > 10
            if method == "get":
                answer = server.get(path.replace("{model}", "target").replace("{id}", "resp_1"))
                assert answer.status_code == (404 if "{id}" in path else 200), path
    schemas = {
        path: methods["post"]["requestBody"] for path, methods in description["paths"].items() if "post" in methods
    }
    for path, body in {**LEAST, "/tokenize": {"prompt": "a"}, "/detokenize": {"tokens": [5]}}.items():
        schema = schemas[path]["content"]["application/json"]["schema"]
        jsonschema.Draft202012Validator.check_schema(schema)
        for more, is_right in ({}, True), ({"temperature": "x"}, False), ({"seed": 1.5}, False):
            is_taken = path.endswith("tokenize") or is_right
            assert jsonschema.Draft202012Validator(schema).is_valid({**body, **more}) == is_taken
            if is_right:
                assert server.post(path, {**body, "max_tokens": 4}).status_code == 200
    top_p = schemas["/v1/completions"]["content"]["application/json"]["schema"]["properties"]["top_p"]
    assert top_p["type"] == "number" and top_p["default"] == 1 and "likeliest tokens" in top_p["description"]


def test_the_page_loads_nothing(server: Server) -> None:
    answer = server.get("/docs")
    assert answer.headers["content-type"].startswith("text/html")
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    assert not re.search(r"https?://|src=|href=|<script|<link|url\(", answer.text)
    for path, schema in bodies().items():
        assert f"POST {path}<" in answer.text
        for name in schema["properties"]:
            assert f"<code>{name}</code>" in answer.text


def test_it_needs_no_key(open_pair: Any) -> None:
    with running(open_pair(), keys=(ApiKey(b"secret"),)) as server:
        assert server.get("/docs").status_code == server.get("/openapi.json").status_code == 200
        assert server.get("/v1/models").status_code == 401
        assert server.get("/docs", headers={"Host": "evil.example"}).status_code == 403
