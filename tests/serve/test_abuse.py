"""Clients that leave, stall, or send what no client should: an error with a reason, and the server lives."""

from __future__ import annotations

import gc
import http.client
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from specrun.decoder import SpeculativeDecoder
from specrun.errors import BackendError, RequestError
from specrun.serve import limits
from specrun.serve.errors import as_api_error
from specrun.serve.generation import Generation
from specrun.serve.keys import read_keys
from specrun.serve.limits import MAX_BODY_BYTES, MAX_HEADER_BYTES
from tests.helpers.server_process import serving
from tests.helpers.servers import Server, running

LONG = {"prompt": "the cat", "max_tokens": 70, "temperature": 0}


def until(condition: Callable[[], bool], seconds: float = 20.0) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def connect(server: Server) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def send(server: Server, body: Any, path: str = "/v1/completions") -> socket.socket:
    """A request whose answer nobody has read yet."""
    data = json.dumps(body).encode()
    client = connect(server)
    client.sendall(f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
    return client


def is_idle(server: Server) -> bool:
    return server.metric("num_requests_running") == server.metric("num_requests_waiting") == 0


def num_generations() -> int:
    return sum(isinstance(each, Generation) for each in gc.get_objects())


@pytest.mark.parametrize("stream", [False, True])
def test_answers_leave_nothing_to_the_garbage_collector(server: Server, stream: bool) -> None:
    """A collection stops every stream."""
    assert until(lambda: is_idle(server))
    gc.collect()
    before = num_generations()
    gc.disable()
    try:
        for _ in range(3):
            body = {"prompt": ["the cat", "the dog"], "max_tokens": 3, "n": 2, "stream": stream}
            assert server.post("/v1/completions", body).status_code == 200
        assert until(lambda: num_generations() <= before), num_generations() - before
    finally:
        gc.enable()


BAD: list[tuple[str, Any, int, str | None]] = [
    ("/v1/completions", {}, 400, "prompt"),
    ("/v1/completions", {"prompt": ""}, 400, "prompt"),
    ("/v1/completions", {"prompt": [10**9]}, 400, "prompt"),
    ("/v1/completions", {"prompt": "x", "max_tokens": 10**6}, 400, "prompt"),
    ("/v1/completions", {"prompt": "x" * 5000}, 400, "prompt"),
    ("/v1/completions", {"prompt": "x", "n": 10**6}, 400, "n"),
    ("/v1/completions", {"prompt": "x", "n": 0}, 400, "n"),
    ("/v1/completions", {"prompt": ["x"] * 100_000}, 400, "prompt"),
    ("/v1/completions", {"prompt": "x", "temperature": -1}, 400, "temperature"),
    ("/v1/completions", {"prompt": "x", "temperature": "hot"}, 400, "temperature"),
    ("/v1/completions", {"prompt": "x", "top_p": 2}, 400, "top_p"),
    ("/v1/completions", {"prompt": "x", "logprobs": 1000}, 400, "logprobs"),
    ("/v1/completions", {"prompt": "x", "stop": ["a"] * 100}, 400, "stop"),
    ("/v1/completions", {"prompt": "x", "logit_bias": {"-1": 3}}, 400, "logit_bias"),
    ("/v1/completions", {"prompt": "x", "logit_bias": {str(10**7): 3}}, 400, "logit_bias"),
    ("/v1/completions", {"prompt": "x", "suffix": "y"}, 400, "suffix"),
    ("/v1/completions", {"prompt": "x", "draft_len": 99}, 400, "draft_len"),
    ("/v1/completions", {"prompt": "x", "model": "gpt-4"}, 404, "model"),
    ("/v1/completions", {"prompt": "x", "stream_options": {"include_usage": True}}, 400, "stream_options"),
    ("/v1/completions", [], 400, None),
    ("/v1/completions", "text", 400, None),
    ("/v1/completions", None, 400, None),
    ("/v1/chat/completions", {}, 400, "messages"),
    ("/v1/chat/completions", {"messages": []}, 400, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "user"}]}, 400, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "hacker", "content": "x"}]}, 400, "messages"),
    ("/v1/chat/completions", {"messages": "hi"}, 400, "messages"),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "tools": [{}]}, 400, "tools"),
    ("/tokenize", {}, 400, "prompt"),
    ("/detokenize", {"tokens": "x"}, 400, "tokens"),
    ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
    ("/detokenize", {}, 400, "tokens"),
    ("/v1/embeddings", {"input": "x"}, 404, None),
]


@pytest.mark.parametrize(("path", "body", "status", "param"), BAD)
def test_bad_bodies(server: Server, path: str, body: Any, status: int, param: str | None) -> None:
    answer = server.post(path, body)
    error = answer.json()["error"]
    assert answer.status_code == status, error
    assert error["message"] and error["type"] in ("invalid_request_error", "not_found_error")
    if param:
        assert error["param"] and error["param"].startswith(param), error


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("/home/me/engines/target/config.json: missing", "config.json: missing"),
        ("cannot read '/srv/models/a-b_1.0/model.onnx' (No such file)", "cannot read 'model.onnx' (No such file)"),
        ('RuntimeError("/onnxruntime_src/core/graph.cc:123 Fail")', 'RuntimeError("graph.cc:123 Fail")'),
        ("POST to http://host/v1/models, a/b or 1/2/3", "POST to http://host/v1/models, a/b or 1/2/3"),
    ],
)
def test_errors_name_no_folders(message: str, told: str) -> None:
    for error in (RequestError(message), BackendError(message)):
        assert as_api_error(error).body["error"]["message"] == told
    assert message not in str(as_api_error(OSError(message)).body), "what nobody expected is not told at all"


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"\xff\xfe", b'{"prompt": NaN}', b"[" * 100_000, b'{"a":' * 50_000, b'{"seed": ' + b"9" * 5000 + b"}"],
)
def test_bodies_that_are_no_json(server: Server, data: bytes) -> None:
    answer = httpx.post(f"{server.url}/v1/completions", content=data, timeout=60)
    assert answer.status_code == 400 and answer.json()["error"]["message"]


def test_a_body_without_end_and_a_header_of_a_megabyte(server: Server) -> None:
    def endless() -> Iterator[bytes]:
        for _ in range(MAX_BODY_BYTES // 65536 + 2):
            yield b"x" * 65536

    answer = httpx.post(f"{server.url}/v1/completions", content=endless(), timeout=60)
    assert answer.status_code == 413
    with connect(server) as client, pytest.raises(OSError):
        client.sendall(b"GET /health HTTP/1.1\r\nx: ")
        for _ in range(1024):
            client.sendall(b"y" * 1024 * (MAX_HEADER_BYTES >> 14))
            time.sleep(0.001)
    assert server.get("/health").status_code == 200


def test_a_connection_without_a_whole_request_is_closed(
    open_pair: Callable[[], SpeculativeDecoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_IDLE_SECONDS", 0.2)
    with running(open_pair()) as server:
        health = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
        for sent in (b"", b"GET /health HTTP/1.1\r\nx: ", health + b"GET /"):
            with connect(server) as client:
                client.sendall(sent)
                client.settimeout(10)
                while client.recv(65536):
                    pass
        target = server.decoder.scheduler.round.host_target
        assert target
        forward = target.forward

        def slow(*arguments: Any) -> Any:
            time.sleep(3 * limits.MAX_IDLE_SECONDS)
            return forward(*arguments)

        monkeypatch.setattr(target, "forward", slow)
        assert "[DONE]" in server.post("/v1/completions", {**LONG, "max_tokens": 3, "stream": True}).text


def test_idle_connections_keep_nobody_out(engines: Path) -> None:
    """Not even with fewer files than connections. What is not idle goes on."""
    body_missing = b"POST / HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n\r\n"
    beginnings = (b"", b"GET /health HTTP/1.1\r\nx: ", body_missing)
    few_files = ["bash", "-c", 'ulimit -n 256 && exec "$@"', "-"]
    body = {"prompt": "the cat", "max_tokens": 100, "ignore_eos": True, "stream": True, "n": 16}
    with serving(engines, within=few_files) as process, ExitStack() as clients:
        server = Server(process.url, None)  # type: ignore[arg-type]
        whole = send(server, {**LONG, "n": 16})
        with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            next(lines)
            for number in range(400):
                idle = clients.enter_context(connect(server))
                idle.sendall(beginnings[number % 3])
                if number % 50 == 0:
                    assert httpx.get(f"{server.url}/health", timeout=5).status_code == 200
            assert [*lines][-2] == "data: [DONE]"
        assert b" 200 " in whole.recv(64)
        whole.close()
        assert httpx.get(f"{server.url}/health", timeout=5).status_code == 200
        log = process.log.read_text()
        assert "Traceback" not in log and len(log) < 60_000, log[:2000]


@pytest.mark.parametrize("stream", [False, True])
def test_clients_that_leave_free_their_rows(server: Server, stream: bool) -> None:
    before = server.metric("generation_tokens_total")
    clients = [send(server, {**LONG, "stream": stream, "n": 3}) for _ in range(6)]  # Some of them wait.
    assert until(lambda: server.metric("num_requests_running") > 0)
    for client in clients:
        client.close()
    assert until(lambda: is_idle(server))
    assert server.metric("generation_tokens_total") - before < 18 * 70
    assert server.post("/v1/completions", {**LONG, "max_tokens": 2}).status_code == 200


def test_two_hundred_disconnects_leave_nothing_behind(server: Server) -> None:
    process = psutil.Process(os.getpid())

    def leave(times: int) -> tuple[int, int]:
        for number in range(times):
            send(server, {**LONG, "stream": number % 2 == 0}).close()
        assert until(lambda: is_idle(server))
        assert until(lambda: process.num_fds() <= files + 8)
        return process.num_fds(), process.memory_info().rss

    files = process.num_fds()
    _, before = leave(100)
    _, after = leave(200)
    assert after - before < 16 << 20


def test_a_slow_reader_holds_nobody_up(server: Server) -> None:
    slow = send(server, {**LONG, "stream": True, "n": 4})
    assert server.post("/v1/completions", {**LONG, "max_tokens": 4}).status_code == 200
    text = b""
    while not text.endswith(b"0\r\n\r\n"):
        text += slow.recv(16)
    assert text.count(b"[DONE]") == 1
    slow.close()


def test_a_full_queue_is_429_and_nothing_of_the_body_runs(engines: Path) -> None:
    """A body of one answer still has room: an eighth of the queue is left to such."""
    body = {**LONG, "n": 56, "max_tokens": 100, "ignore_eos": True}
    with serving(engines, "--max_queue", "64") as process:
        server = Server(process.url, None)  # type: ignore[arg-type]
        other = send(server, body)
        assert until(lambda: server.metric("num_requests_waiting") > 0)
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
        for stream in (False, True):
            connection.request("POST", "/v1/completions", json.dumps(body | {"stream": stream}))
            answer = connection.getresponse()
            error = json.loads(answer.read())["error"]
            assert answer.status == 429 and int(answer.headers["retry-after"]) > 0
            assert error["type"] == "rate_limit_error" and error["code"] == "queue_full"
            assert answer.headers["connection"] != "close", "the client may ask again on it"
        assert server.post("/v1/completions", {"prompt": "the cat", "max_tokens": 2}).status_code == 200
        other.close()
        assert until(lambda: is_idle(server))
        assert server.metric("generation_tokens_total") <= 56 * 100 + 2
        connection.close()
        assert "Traceback" not in process.log.read_text()


def test_what_can_never_be_served_is_400(open_pair: Callable[[], SpeculativeDecoder]) -> None:
    with running(open_pair(), max_queue=256) as server:
        answer = server.post("/v1/completions", {"prompt": ["a"] * 8, "n": 128, "max_tokens": 1})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "n"
        assert "1024 answers, expected at most 224" in answer.json()["error"]["message"]
        assert "retry-after" not in answer.headers


def test_what_a_stranger_writes_is_cut_and_escaped_in_the_log(engines: Path) -> None:
    name = "\u202e\u2028" + "x" * (4 << 20)
    with serving(engines) as server:
        fields = {name: 1} | {f"f{number}": 1 for number in range(10_000)}
        body = {"prompt": "the cat", "max_tokens": 1, "model": name}
        assert len(httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).text) < 1000
        del body["model"]
        headers = [(b"x-request-id", b"a\x9b31mred\x85next")]
        assert httpx.post(f"{server.url}/v1/completions", json=body | fields, headers=headers, timeout=60).is_success
        assert httpx.get(f"{server.url}/%E2%80%A8%C2%9B{'y' * 50_000}").status_code == 404
        text = server.log.read_text()
        assert len(text) < 5000
        logged = [line for line in text.split("\n") if line.startswith("{")]
        assert all(line.isprintable() for line in logged)
        lines = [json.loads(line) for line in logged]
        (ignored,) = [line for line in lines if line["event"] == "ignored"]
        assert ignored["id"] == "a\x9b31mred\x85next" and ignored["fields"][0].startswith("\u202e\u2028xxx")


def test_keys_guard_everything_but_health(open_pair: Callable[[], SpeculativeDecoder], tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("# ours\nfirst-secret\nsecond-secret no_block_reuse\n")
    with running(open_pair(), keys=read_keys(tmp_path / "keys")) as server:
        for path in ("/v1/models", "/metrics", "/version", "/v1/completions", "/tokenize", "/nothing"):
            for header in ("", "Bearer wrong-secret", "first-secret", "Basic first-secret"):
                answer = server.get(path, headers={"authorization": header} if header else {})
                assert answer.status_code == 401 and answer.json()["error"]["code"] == "invalid_api_key"
        assert server.get("/health").status_code == 200
        bodies = [{**LONG, "prompt": "the cat sat on a mat and", "max_tokens": 2}] * 3
        cached = []
        for secret in ("first-secret", "second-secret"):
            headers = {"authorization": f"Bearer {secret}"}
            found = [server.post("/v1/completions", body, headers=headers).json()["usage"] for body in bodies]
            cached.append([one["prompt_tokens_details"]["cached_tokens"] for one in found])
        assert cached[0][-1] > 0 and cached[1] == [0, 0, 0]


def test_key_files_that_are_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "keys"
    wrong = {"": "no key", "short\n": "8 characters", "a-long-secret twice\n": "twice", "secret#1 # b\n": "'#'"}
    for content, message in wrong.items():
        path.write_text(content)
        with pytest.raises(RequestError, match=message):
            read_keys(path)
    with pytest.raises(RequestError, match="cannot be read"):
        read_keys(tmp_path / "none")
    monkeypatch.setenv("SPECRUN_API_KEY", "from-the-environment")
    assert [key.secret for key in read_keys(None)] == [b"from-the-environment"]
    path.write_text("  # a comment\n#another-one\nse#cret-key# no_block_reuse\n")
    assert [key.secret for key in read_keys(path)] == [b"se#cret-key#", b"from-the-environment"]
    for value, message in {"": "is empty", "from-the-environment\n": "line end", "two words": "letters"}.items():
        monkeypatch.setenv("SPECRUN_API_KEY", value)
        with pytest.raises(RequestError, match=message):
            read_keys(None)


def test_an_error_in_a_step_is_one_answers_and_many_are_the_engines(
    open_pair: Callable[[], SpeculativeDecoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(open_pair()) as server:
        target = server.decoder.scheduler.round.host_target
        assert target
        good, fails = target.forward, 1

        def forward(*arguments: Any) -> Any:
            nonlocal fails
            fails -= 1
            if fails >= 0:
                raise BackendError("out of luck")
            return good(*arguments)

        monkeypatch.setattr(target, "forward", forward)
        answer = server.post("/v1/completions", LONG)
        assert answer.status_code == 500 and "out of luck" in answer.json()["error"]["message"]
        assert server.post("/v1/completions", LONG).status_code == 200
        fails = 10**9
        for _ in range(3):
            stream = server.post("/v1/completions", {**LONG, "stream": True})
            assert "out of luck" in stream.text and "[DONE]" not in stream.text
        assert server.get("/health").status_code == 503
        fails = 0
        assert server.post("/v1/completions", LONG).status_code == 200 == server.get("/health").status_code


def test_a_connection_outlives_the_time_that_clients_keep_it(server: Server) -> None:
    """httpx and others keep it for 5 s. A server that closes it then meets their next request."""
    address = server.url.removeprefix("http://")
    connection = http.client.HTTPConnection(address, timeout=10)
    for pause in (0.0, 5.5):
        time.sleep(pause)
        connection.request("GET", "/health")
        assert connection.getresponse().read()
    connection.close()
