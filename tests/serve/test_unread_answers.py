"""Clients that do not read, or hold many connections: others go on, and memory stays bounded."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import httpx
import psutil
import pytest

from specrun.decoder import SpeculativeDecoder
from specrun.serve import limits
from specrun.serve.keys import read_keys
from specrun.text.chat_template import ChatTemplate
from tests.helpers.server_process import serving
from tests.helpers.servers import Server, running
from tests.serve.test_abuse import LONG, connect, is_idle, send, until

HEALTH = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
MUCH = {"prompt": "the cat", "n": 56, "max_tokens": 100, "ignore_eos": True, "logprobs": 20}
"""Megabytes of events, more than the system keeps for a client."""


def ask(server: Server, body: dict[str, object]) -> socket.socket:
    """Send a body from a client for which the system keeps little."""
    host, port = server.url.removeprefix("http://").split(":")
    client = socket.socket()
    client.settimeout(20)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect((host, int(port)))
    data = json.dumps(body).encode()
    client.sendall(
        f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data
    )
    return client


def pipeline(client: socket.socket, data: bytes, most: int) -> None:
    """Send ``data`` again and again, and read nothing, until the server takes no more."""
    client.settimeout(0.5)
    try:
        for _ in range(most):
            client.sendall(data)
    except OSError:  # Nothing was taken for so long, or the server has ended it.
        pass


def test_answers_that_nobody_reads_keep_nobody_out(
    open_pair: Callable[[], SpeculativeDecoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_CONNECTIONS", 8)
    with running(open_pair(), max_connections_by_address=100) as server, ExitStack() as clients:
        for _ in range(10):
            client = clients.enter_context(connect(server))
            pipeline(client, HEALTH * 1000, 100)
            assert server.get("/health").status_code == 200
            assert server.post("/v1/completions", {**LONG, "max_tokens": 2}).status_code == 200


def test_a_write_that_stalls_ends_its_connection(open_pair: Callable[[], SpeculativeDecoder]) -> None:
    with running(open_pair(), write_seconds=0.4) as server, connect(server) as client:
        port = client.getsockname()[1]
        pipeline(client, HEALTH * 1000, 100)
        assert until(
            lambda: (
                not any(
                    one.raddr and one.raddr.port == port and one.status == "ESTABLISHED"
                    for one in psutil.Process().net_connections()
                )
            )
        )


def test_a_slow_reader_is_not_a_stalled_one(open_pair: Callable[[], SpeculativeDecoder]) -> None:
    """It takes a second at least, several times as long as a stall may."""
    with running(open_pair(), write_seconds=0.3) as server, ask(server, MUCH) as client:
        found = client.recv(4096)
        head, _, found = found.partition(b"\r\n\r\n")
        size = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        assert size > 2_000_000
        for _ in range(100):
            found += client.recv(16384)
            time.sleep(0.01)
        assert len(found) < size
        while len(found) < size:
            part = client.recv(1 << 20)
            assert part
            found += part
        assert found.count(b'"finish_reason":"length"') == MUCH["n"]


def test_a_stream_that_nobody_reads_ends_is_counted_and_frees_its_rows(
    open_pair: Callable[[], SpeculativeDecoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_UNREAD_ENTRIES", 500)
    monkeypatch.setattr(limits, "UNREAD_ENTRIES_PER_ANSWER", 1)
    with running(open_pair(), write_seconds=60) as server:
        ended = 'specrun:request_success_total{finished_reason="cancelled",model_name="target"}'
        with ask(server, {**MUCH, "stream": True}) as client:
            assert until(lambda: ended in server.get("/metrics").text, 60)
            assert until(lambda: is_idle(server))
            assert server.metric("generation_tokens_total") < 56 * 100
            assert server.post("/v1/completions", {**LONG, "max_tokens": 2}).status_code == 200
            text = b""
            while b"0\r\n\r\n" not in text[-7:]:  # One that reads after all is told.
                text += client.recv(65536)
        assert b"were not read; the answer ends" in text[-1000:]


def test_a_reader_that_keeps_up_has_all_events(
    open_pair: Callable[[], SpeculativeDecoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_UNREAD_ENTRIES", 1000)
    monkeypatch.setattr(limits, "UNREAD_ENTRIES_PER_ANSWER", 1)
    with running(open_pair()) as server:
        answer = server.post("/v1/completions", {**MUCH, "logprobs": None, "stream": True})
        assert answer.text.count('"finish_reason":"length"') == 56, "5600 tokens, 1000 of which may wait"
        assert answer.text.rstrip().endswith("[DONE]")


def test_unread_answers_take_a_bounded_amount_of_memory(
    open_pair: Callable[[], SpeculativeDecoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "MAX_UNREAD_BYTES", 4 << 20)
    with running(open_pair(), write_seconds=60, max_queue=512) as server, ExitStack() as clients:
        for _ in range(6):
            clients.enter_context(ask(server, MUCH))
        assert until(lambda: server.metric("generation_tokens_total") >= 6 * 56 * 100, 60)
        assert until(lambda: is_idle(server))

        def open_ones() -> int:
            port = int(server.url.rpartition(":")[2])
            own = psutil.Process().net_connections()
            return sum(one.laddr.port == port and one.status == "ESTABLISHED" for one in own)

        assert until(lambda: open_ones() <= 4), "those that have waited longest were ended"


def test_an_address_has_a_limit_and_health_a_place(open_pair: Callable[[], SpeculativeDecoder]) -> None:
    with running(open_pair(), max_connections_by_address=2) as server, ExitStack() as clients:
        streams = [clients.enter_context(send(server, {**MUCH, "n": 24, "stream": True})) for _ in range(2)]
        assert all(b" 200 " in stream.recv(64) for stream in streams)
        for _ in range(2 * limits.SPARE_CONNECTIONS):
            clients.enter_context(connect(server))
        assert server.get("/health").status_code == 200
        refused = server.get("/v1/models")
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "too_many_connections"
        assert refused.headers["connection"] == "close" and int(refused.headers["retry-after"]) > 0
        for stream in streams:
            stream.close()
        assert until(lambda: server.get("/v1/models").status_code == 200)


def test_idle_connections_of_an_address_give_way_to_its_next_ones(open_pair: Callable[[], SpeculativeDecoder]) -> None:
    with running(open_pair(), max_connections_by_address=2) as server, ExitStack() as clients:
        for _ in range(4):
            client = clients.enter_context(connect(server))
            client.sendall(HEALTH)
            assert b" 200 " in client.recv(4096)
        assert server.get("/v1/models").status_code == 200


def test_a_body_with_two_lengths_is_refused_and_the_connection_closed(server: Server) -> None:
    body = json.dumps({"prompt": "the cat", "max_tokens": 2}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n"
    chunked = b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    with connect(server) as client:
        client.sendall(head.encode() + chunked)
        answer = b""
        while part := client.recv(65536):
            answer += part
    assert answer.startswith(b"HTTP/1.1 400 ") and b"Transfer-Encoding cannot be combined" in answer


def test_a_body_in_tiny_chunks_is_refused(server: Server) -> None:
    head = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    with connect(server) as client:
        client.sendall(head + b"1\r\na\r\n" * 1000)
        answer = b""
        with suppress(ConnectionError):
            while part := client.recv(65536):
                answer += part
    assert answer.startswith(b"HTTP/1.1 400 ")
    body = b'{"prompt": "' + b"the cat " * 40 + b'"}'
    pieces = [body[start : start + 4] for start in range(0, len(body), 4)]
    with connect(server) as client:  # As a person's program may send it.
        client.sendall(head + b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 200 ")


def test_bodies_that_are_coming_take_a_bounded_amount_of_memory(
    open_pair: Callable[[], SpeculativeDecoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specrun.serve.bodies.MAX_RECEIVED_BYTES", 100_000)
    head = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000\r\n\r\n"
    with running(open_pair()) as server, ExitStack() as clients:
        for _ in range(5):
            client = clients.enter_context(connect(server))
            client.sendall(head + b"x" * 40_000)
        assert client.recv(65536).startswith(b"HTTP/1.1 429 ")
        assert until(lambda: server.post("/tokenize", {"prompt": "the cat"}).status_code == 200)


def test_a_client_without_a_key_is_not_read_to_its_end(
    open_pair: Callable[[], SpeculativeDecoder], tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("a-long-secret\n")
    with running(open_pair(), keys=read_keys(tmp_path / "keys")) as server, connect(server) as client:
        client.sendall(b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-length: 1000000\r\n\r\n{")
        answer = b""
        while part := client.recv(65536):
            answer += part
        assert answer.startswith(b"HTTP/1.1 401 ") and b"connection: close" in answer.lower()


def test_errors_name_no_folders_of_the_server(
    open_pair: Callable[[], SpeculativeDecoder], engines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(open_pair()) as server:
        template = ChatTemplate("{{ nothing.at.all }}", {}, engines / "target")
        monkeypatch.setattr(ChatTemplate, "load", lambda *_arguments: template)
        chat = server.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]})
        assert chat.status_code == 400, chat.text
        assert chat.json()["error"]["message"].startswith("target: the chat template failed")
        monkeypatch.setattr(type(server.decoder.scheduler.round), "problem", lambda _: f"{engines}/target: lost")
        health = server.get("/health")
        assert health.status_code == 503 and health.json()["reason"] == "model 'target': target: lost"

        def broken(*_arguments: object) -> None:
            raise OSError(f"{engines}/target/model.onnx")

        monkeypatch.setattr("specrun.serve.app.read_either", broken)
        answer = server.post("/tokenize", {"prompt": "x"})
        assert answer.status_code == 500 and "model.onnx" not in answer.text and "x-request-id" in answer.text


def test_the_look_at_large_bodies_does_not_starve(engines: Path) -> None:
    with serving(engines) as process:
        body = {"prompt": "the cat", "max_tokens": 1} | {f"f{number}": 1 for number in range(50_000)}
        assert httpx.post(f"{process.url}/v1/completions", json=body, timeout=60).is_success
        (child,) = psutil.Process(process.process.pid).children()
        assert 0 < child.nice() <= 5
