"""SIGHUP reads keys and models again, and ends a server whose terminal has closed."""

from __future__ import annotations

import json
import os
import pty
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.helpers.server_process import Server, serving, serving_with
from tests.serve.test_abuse import until

BODY = {"prompt": "the cat", "max_tokens": 6, "temperature": 0}
LONG = {**BODY, "max_tokens": 100, "n": 8, "ignore_eos": True, "stream": True}
IN_TERMINAL = "import os, sys; os.setsid(); os.open(sys.argv[1], os.O_RDWR); os.execv(sys.argv[2], sys.argv[2:])"
"""Runs a command as the first of a terminal's session."""


@pytest.fixture
def hangs_up() -> Iterator[None]:
    """Processes that begin now obey SIGHUP, whether this suite was started by nohup or not."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@contextmanager
def streaming(server: Server, **more: Any) -> Iterator[Iterator[str]]:
    """The lines of a stream, behind the first."""
    headers = more.pop("headers", {})
    url = f"{server.url}/v1/completions"
    with httpx.stream("POST", url, json={**LONG, **more}, headers=headers, timeout=60) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: {")
        yield lines


def hang_up(server: Server, event: str = "reloaded") -> dict[str, Any]:
    """What the log says when it has been obeyed."""

    def seen() -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in server.log.read_text().splitlines() if line.startswith("{")]
        return [line for line in lines if event in line["event"]]

    before = len(seen())
    os.kill(server.process.pid, signal.SIGHUP)
    assert until(lambda: len(seen()) > before), server.log.read_text()
    return seen()[-1]


def status(server: Server, key: str = "", **more: Any) -> int:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return httpx.post(f"{server.url}/v1/completions", json={**BODY, **more}, headers=headers, timeout=60).status_code


def test_keys_are_read_again(engines: Path, tmp_path: Path) -> None:
    """A stream goes on whose key is gone, and a file with mistakes changes nothing."""
    keys = tmp_path / "keys"
    keys.write_text("first-key\n")
    with serving(engines, "--api_key_file", str(keys)) as server:
        assert (status(server, "first-key"), status(server, "second-key")) == (200, 401)
        with streaming(server, headers={"Authorization": "Bearer first-key"}) as lines:
            keys.write_text("second-key\nthird-key\n")
            assert hang_up(server)["keys"] == 2
            assert (status(server, "first-key"), status(server, "second-key")) == (401, 200)
            assert [*lines][-2] == "data: [DONE]"
        keys.write_text("short\n")
        assert "at least 8 characters" in hang_up(server, "nothing was reloaded")["event"]
        keys.unlink()
        assert "cannot be read" in hang_up(server, "nothing was reloaded")["event"]
        assert status(server, "second-key") == 200


@pytest.fixture
def write(engines: Path, tmp_path: Path) -> Callable[..., Path]:
    def written(**models: Any) -> Path:
        (tmp_path / "models.yaml").write_text(yaml.safe_dump(models, sort_keys=False))
        return tmp_path / "models.yaml"

    return written


def test_models_are_read_again(engines: Path, write: Callable[..., Path]) -> None:
    """What stays equal stays loaded; what changed is loaded anew, and its stream goes on."""
    target, draft = ({"target": str(engines / name)} for name in ("target", "draft"))
    file = str(write(a=target, b=draft))
    with serving_with("--models", file, "--max_loaded", "3") as server:
        assert (status(server, model="a"), status(server, model="b"), status(server, model="c")) == (200, 200, 404)
        with streaming(server, model="b") as lines:
            write(a={**target, "aliases": ["c"]}, b={**draft, "max_queue": 3})
            assert hang_up(server)["models"] == ["a", "b"]
            assert [*lines][-2] == "data: [DONE]"
        listed = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert [(one["id"], one["aliases"], one["loaded"]) for one in listed] == [("a", ["c"], True), ("b", [], False)]
        assert (status(server, model="c"), status(server, model="b")) == (200, 200)
        assert until(lambda: server.log.read_text().count('"asleep", "model": "b"') == 1)
        write(b=draft)
        assert hang_up(server)["models"] == ["b"]
        assert (status(server, model="a"), status(server, model="c")) == (404, 404)
        assert until(lambda: '"asleep", "model": "a"' in server.log.read_text())
        write(b={**draft, "draft_len": "many"})
        assert "models.yaml: b: Invalid value for '--draft_len'" in hang_up(server, "nothing was reloaded")["event"]
        assert status(server, model="b") == 200


@pytest.mark.usefixtures("hangs_up")
def test_a_terminal_that_closes_lets_answers_end(engines: Path) -> None:
    terminal, other_end = pty.openpty()
    within = (sys.executable, "-c", IN_TERMINAL, os.ttyname(other_end))
    with serving(engines, within=within) as server:
        os.close(other_end)
        assert hang_up(server)["keys"] == 0, "it is open"
        with streaming(server) as lines:
            os.close(terminal)
            assert [*lines][-2] == "data: [DONE]"
        assert server.process.wait(20) == 0


def test_a_server_that_nohup_started_outlives_its_terminal(engines: Path) -> None:
    terminal, other_end = pty.openpty()
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with serving(engines, within=(sys.executable, "-c", IN_TERMINAL, os.ttyname(other_end))) as server:
            os.close(other_end)
            os.close(terminal)
            assert hang_up(server)["keys"] == 0
            assert status(server) == 200
    finally:
        signal.signal(signal.SIGHUP, before)
