"""Web pages of strangers, in a browser on the server's machine, get no answer. Programs and own pages do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from specrun.decoder import SpeculativeDecoder
from specrun.errors import RequestError
from specrun.serve.hosts import read_hosts
from tests.helpers.server_process import serving
from tests.helpers.servers import Server, running

BODY = {"prompt": "the cat", "max_tokens": 1}
FOREIGN = [
    {"host": "evil.example"},
    {"host": "evil.example:8000"},
    {"host": "127.0.0.1.evil.example"},
    {"host": "localhost.evil.example"},
    {"host": "192.0.2.7"},
    {"host": "["},
    {"origin": "https://evil.example"},
    {"origin": "http://127.0.0.1.evil.example"},
    {"origin": "http://127.0.0.1@evil.example"},
    {"origin": "null"},
]
OWN = [
    {},
    {"host": "localhost"},
    {"host": "LOCALHOST:8000"},
    {"host": "127.0.0.1:1"},
    {"host": "127.1.2.3"},
    {"host": "[::1]:8000"},
    {"host": "app.localhost:8000"},
    {"origin": "http://localhost:3000"},
    {"origin": "https://127.0.0.1"},
]


def ask(server: Server | Any, headers: dict[str, str]) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json=BODY, headers=headers, timeout=60)


@pytest.mark.parametrize("headers", FOREIGN, ids=str)
def test_a_foreign_page_gets_no_answer(server: Server, headers: dict[str, str]) -> None:
    before = server.metric("generation_tokens_total")
    answer = ask(server, headers)
    error = answer.json()["error"]
    assert answer.status_code == 403 and error["code"] == "host_not_allowed" and error["type"] == "permission_error"
    assert "--allowed_hosts" in error["message"]
    assert server.get("/v1/models", headers=headers).status_code == 403
    assert server.get("/health", headers=headers).status_code == 200, "probes send any name"
    assert server.metric("generation_tokens_total") == before


@pytest.mark.parametrize("headers", OWN, ids=str)
def test_this_machine_does(server: Server, headers: dict[str, str]) -> None:
    assert ask(server, headers).status_code == 200


def test_names_can_be_allowed(open_pair: Callable[[], SpeculativeDecoder]) -> None:
    with running(open_pair(), allowed_hosts=read_hosts("Models.Example, ui.example")) as server:
        assert ask(server, {"host": "models.example:443", "origin": "https://ui.example"}).status_code == 200
        assert ask(server, {"host": "models.example", "origin": "https://evil.example"}).status_code == 403
        assert ask(server, {"host": "x.models.example"}).status_code == 403
    with running(open_pair(), allowed_hosts=read_hosts("*")) as server:
        assert all(ask(server, headers).status_code == 200 for headers in FOREIGN)


def test_the_command_checks_where_nothing_else_guards(engines: Path) -> None:
    """With a key, or on an address that others reach, clients have names that nobody has told the server."""
    foreign, status = FOREIGN[0], {}
    for name, options in {
        "plain": [],
        "open": ["--host", "0.0.0.0"],
        "named": ["--allowed_hosts", "a.example"],
    }.items():
        with serving(engines, *options) as server:
            status[name] = ask(server, foreign).status_code
            if name == "named":
                assert ask(server, {"host": "a.example"}).status_code == 200
    assert status == {"plain": 403, "open": 200, "named": 403}


@pytest.mark.parametrize("text", ["http://a.example", "a.example:80", "a/b"])
def test_what_is_no_name_is_refused(text: str) -> None:
    with pytest.raises(RequestError, match="expected names without scheme and port"):
        read_hosts(text)
    assert read_hosts("[::1], B.example,") == {"::1", "b.example"}
