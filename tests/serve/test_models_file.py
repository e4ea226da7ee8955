"""``specrun serve --models``: the file, and the process that serves it."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click
import httpx
import psutil
import pytest
import yaml
from click.testing import CliRunner

from specrun.cli import main
from specrun.commands.served_models import read_models
from specrun.errors import RequestError
from tests.helpers.server_process import Server, serving_with
from tests.serve.test_abuse import until

BODY = {"prompt": "the cat", "max_tokens": 6, "temperature": 0}


@pytest.fixture
def write(tmp_path: Path) -> Callable[[Any], Path]:
    def written(settings: Any) -> Path:
        file = tmp_path / "models.yaml"
        file.write_text(settings if isinstance(settings, str) else yaml.safe_dump(settings, sort_keys=False))
        return file

    return written


def read(file: Path) -> Any:
    return read_models(file, click.Context(main.commands["serve"], info_name="serve"))


def test_a_model_has_the_options_of_the_command(engines: Path, write: Callable[[Any], Path]) -> None:
    pair = {"target": str(engines / "target"), "draft_model": str(engines / "draft"), "draft_len": 3, "warm_up": False}
    more = {"aliases": ["gpt-4o", "b c"], "max_queue": 5, "request_timeout": 2.5, "tool_call_format": "hermes"}
    one, other = read(write({"pair": {**pair, **more}, "alone": {"target": str(engines / "draft"), "draft": "suffix"}}))
    assert (one.name, one.aliases, one.max_queue, one.timeout) == ("pair", ("gpt-4o", "b c"), 5, 2.5)
    assert (other.name, other.aliases, other.max_queue, other.timeout) == ("alone", (), 256, None)
    loaded = one.load(lambda _stop: None)
    with loaded.decoder as decoder:
        assert decoder.scheduler.lengths.max_draft_len == 3
        (request,) = decoder.generate(["the cat"], max_output_len=6, temperature=0)
        assert request.stats.drafted > 0


def test_models_are_equal_where_loading_them_gives_the_same(engines: Path, write: Callable[[Any], Path]) -> None:
    target = {"target": str(engines / "target")}
    (before,), (same,), (other,) = (
        read(write({"a": settings})) for settings in (target, {**target, "aliases": ["b"]}, {**target, "max_queue": 2})
    )
    assert before == same and before != other


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "no model in it"),
        ([], "found list"),
        ("[", "not readable YAML"),
        ({"a": 5}, "a: expected the model's options"),
        ({5: {"target": "ENGINE"}}, "5: expected a text"),
        ({"": {"target": "ENGINE"}}, "expected a text"),
        ({"a": {}}, "a: give TARGET"),
        ({"a": {"target": "/no/where"}}, "a: /no/where: no such directory"),
        ({"a": {"draft_model": "ENGINE"}}, "a: draft_model: needs target"),
        ({"a": {"target": "ENGINE", "drft_len": 3}}, "a: a model has no option 'drft_len'; did you mean 'draft_len'?"),
        ({"a": {"target": "ENGINE", "threads": 3}}, "a: a model has no option 'threads'"),
        ({"a": {"target": "ENGINE", "port": 3}}, "a: a model has no option 'port'"),
        ({"a": {"target": "ENGINE", "draft": "suffix", "draft_len": "x"}}, "a: Invalid value for '--draft_len'"),
        ({"a": {"target": "ENGINE", "draft_len": 3}}, "a: --draft_len needs a draft"),
        ({"a": {"target": "ENGINE", "qformat": "int8"}}, "a: --qformat is for checkpoints"),
        ({"a": {"target": "ENGINE", "warm_up": "perhaps"}}, "a: Invalid value for '--warm_up'"),
        ({"a": {"target": "ENGINE", "tool_call_format": "x"}}, "a: Invalid value for --tool_call_format"),
        ({"a": {"target": "ENGINE", "aliases": "b"}}, "a: aliases: expected a list"),
        ({"a": {"target": "ENGINE", "aliases": ["b"]}, "b": {"target": "ENGINE"}}, "b: 'b' is a name of 'a' already"),
        ({"a": {"target": "ENGINE", "aliases": ["a"]}}, "a: 'a' is a name of 'a' already"),
        ("a: {target: x/y}\na: {target: x/y}", "'a' is given twice"),
    ],
)
def test_a_mistake_is_told_in_one_line(settings: Any, said: str, engines: Path, write: Callable[[Any], Path]) -> None:
    text = settings if isinstance(settings, str) else yaml.safe_dump(settings)
    file = write(text.replace("ENGINE", str(engines / "target")))
    with pytest.raises(RequestError, match=re.escape(said)) as found:
        read(file)
    assert str(found.value).startswith(f"{file}: ")
    ended = CliRunner().invoke(main, ["serve", "--models", str(file), "--port", "0"])
    assert ended.exit_code == 1 and said in ended.stderr and len(ended.stderr.splitlines()) == 1


def test_options_of_models_stand_in_the_file(engines: Path, write: Callable[[Any], Path]) -> None:
    file = str(write({"a": {"target": str(engines / "target")}}))
    for options in ([str(engines / "target")], ["--qformat", "int8"], ["--model_name", "b"], ["--max_queue", "3"]):
        ended = CliRunner().invoke(main, ["serve", "--models", file, "--port", "0", *options])
        assert ended.exit_code == 2 and "cannot be combined with --models" in ended.stderr
    ended = CliRunner().invoke(main, ["serve", "--models", f"{file}x", "--port", "0"])
    assert ended.exit_code == 1 and "--models wants a YAML file" in ended.stderr


@pytest.fixture
def pool() -> Any:
    with ThreadPoolExecutor() as pool:
        yield pool


def post(server: Server, model: str) -> httpx.Response:
    return httpx.post(f"{server.url}/v1/completions", json={**BODY, "model": model}, timeout=300)


def builds(server: Server) -> list[psutil.Process]:
    return [one for one in psutil.Process(server.process.pid).children() if "specbuild.pair" in one.cmdline()]


def begin_build(server: Server, pool: ThreadPoolExecutor) -> tuple[Future[httpx.Response], psutil.Process]:
    """Ask for the model that has no engines yet."""
    waiting = pool.submit(post, server, "built")
    assert until(lambda: bool(builds(server)))
    (build,) = builds(server)
    return waiting, build


@pytest.fixture
def file(
    engines: Path, hf: Path, write: Callable[[Any], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Path:
    """A model with an engine, and one that has to be built."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    checkpoint = {"target": str(hf / "target"), "verify": False, "max_seq_len": 64, "device": "cpu"}
    return write({"built": checkpoint, "ready": {"target": str(engines / "target")}})


def test_others_are_answered_while_engines_are_built(file: Path, pool: ThreadPoolExecutor) -> None:
    with serving_with("--models", str(file), "--max_loaded", "2") as server:
        waiting, build = begin_build(server, pool)
        assert post(server, "ready").status_code == 200 == httpx.get(f"{server.url}/health").status_code
        assert build.is_running() and not waiting.done()
        answer = waiting.result(300)
        assert answer.status_code == 200 and answer.json()["model"] == "built", server.log.read_text()
        assert post(server, "ready").status_code == 200


def test_a_signal_ends_a_build(file: Path, pool: ThreadPoolExecutor) -> None:
    with serving_with("--models", str(file)) as server:
        waiting, build = begin_build(server, pool)
        os.kill(server.process.pid, signal.SIGTERM)
        answer = waiting.result(60)
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "stopped"
        assert server.process.wait(60) == 0 and not build.is_running()
        assert "Traceback" not in server.log.read_text()


def test_a_build_that_fails_is_told_to_the_log_alone(file: Path, pool: ThreadPoolExecutor) -> None:
    with serving_with("--models", str(file)) as server:
        waiting, build = begin_build(server, pool)
        build.kill()
        answer = waiting.result(60)
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "model_not_loaded"
        assert "specbuild failed with exit status -9" in server.log.read_text()
        assert "specbuild" not in answer.text
        assert post(server, "ready").status_code == 200
