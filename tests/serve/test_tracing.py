"""Traces, as a collector of OTLP over HTTP receives them."""

from __future__ import annotations

import gzip
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from specrun.decoder import SpeculativeDecoder
from specrun.serve.keys import ApiKey
from specrun.serve.tracing import Tracing
from tests.helpers.server_process import serving
from tests.helpers.servers import running

BODY = {"prompt": "the cat", "max_tokens": 12, "temperature": 0, "ignore_eos": True, "seed": 3, "draft_len": 4}
TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@dataclass
class Collector:
    """What came to a collector."""

    url: str = ""
    spans: list[Any] = field(default_factory=list)
    services: set[str] = field(default_factory=set)

    def take(self, data: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(data).resource_spans:
            self.services.add(told(resource.resource)["service.name"])
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]

    def named(self, name: str) -> list[Any]:
        return [span for span in self.spans if span.name == name]

    def below(self, span: Any) -> list[Any]:
        return [one for one in self.spans if one.parent_span_id == span.span_id]


def told(carrier: Any) -> dict[str, Any]:
    """Attributes by their names."""
    values: dict[str, Any] = {}
    for one in carrier.attributes:
        kind = one.value.WhichOneof("value")
        value = getattr(one.value, kind)
        values[one.key] = [each.string_value for each in value.values] if kind == "array_value" else value
    return values


@contextmanager
def collecting() -> Iterator[Collector]:
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["content-length"]))
            assert self.path == "/v1/traces" and self.headers["content-type"] == "application/x-protobuf"
            collector.take(gzip.decompress(data) if self.headers["content-encoding"] == "gzip" else data)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(ExportTraceServiceResponse().SerializeToString())

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector.url = f"http://127.0.0.1:{server.server_port}/v1/traces"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield collector
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_request_and_what_its_answers_did(open_pair: Callable[[], SpeculativeDecoder]) -> None:
    with collecting() as collector:
        with running(open_pair(), tracing=Tracing(collector.url)) as server:
            headers = {"traceparent": f"00-{TRACE}-{CALLER}-01", "tracestate": "a=b", "x-request-id": "mine"}
            answer = server.post("/v1/completions", {**BODY, "n": 2}, headers=headers).json()
            for path in ("/health", "/ready", "/metrics"):
                server.get(path)
        assert collector.services == {"specrun"}
        (span,) = collector.named("text_completion target")
        assert span.trace_id.hex() == TRACE and span.parent_span_id.hex() == CALLER and span.trace_state == "a=b"
        assert span.kind == Span.SPAN_KIND_SERVER and span.status.code == Status.STATUS_CODE_UNSET
        found, usage = told(span), answer["usage"]
        assert found["gen_ai.operation.name"] == "text_completion" and found["gen_ai.response.model"] == "target"
        assert found["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
        assert found["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 24
        assert found["gen_ai.request.max_tokens"] == 12 and found["gen_ai.request.seed"] == 3
        assert found["gen_ai.response.finish_reasons"] == ["length", "length"]
        assert found["http.response.header.x-request-id"] == ["mine"] and found["http.response.status_code"] == 200
        assert "the cat" not in str(collector.spans)
        parts = collector.below(span)
        assert len(collector.spans) == 1 + len(parts) == 7
        for number in range(2):
            queue, prefill, decode = (one for one in parts if told(one)["specrun.choice.index"] == number)
            assert (queue.name, prefill.name, decode.name) == ("queue", "prefill", "decode")
            assert span.start_time_unix_nano <= queue.start_time_unix_nano
            assert queue.end_time_unix_nano == prefill.start_time_unix_nano < prefill.end_time_unix_nano
            assert prefill.end_time_unix_nano == decode.start_time_unix_nano < decode.end_time_unix_nano
            assert told(prefill)["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
            assert {one.trace_id for one in (queue, prefill, decode)} == {span.trace_id}
        decodes = [told(one) for one in collector.spans if one.name == "decode"]
        assert [one["gen_ai.usage.output_tokens"] for one in decodes] == [12, 12]
        speculation = answer["metrics"]["speculative_decoding"]
        for name, total in (("proposed", "num_draft_tokens"), ("accepted", "num_accepted_draft_tokens")):
            assert sum(one[f"specrun.draft.{name}_tokens"] for one in decodes) == speculation[total]
        assert speculation["num_draft_tokens"] > 0


def test_what_fails(open_pair: Callable[[], SpeculativeDecoder], monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of clients are told, and those of the server are errors of the trace."""
    key = {"Authorization": "Bearer secret"}
    with collecting() as collector:
        with running(open_pair(), keys=(ApiKey(b"secret"),), tracing=Tracing(collector.url)) as server:
            assert server.post("/v1/completions", BODY).status_code == 401
            assert (
                server.post("/v1/chat/completions", {"model": "other", "messages": []}, headers=key).status_code == 404
            )
            target = server.decoder.scheduler.round.host_target
            assert target

            def forward(*_: Any) -> Any:
                raise RuntimeError("out of luck")

            monkeypatch.setattr(target, "forward", forward)
            assert server.post("/v1/completions", BODY, headers=key).status_code == 500
            assert server.post("/v1/completions", {**BODY, "stream": True}, headers=key).status_code == 200
        denied, unknown, failed, broken = (span for span in collector.spans if span.kind == Span.SPAN_KIND_SERVER)
        for span, kind in ((denied, "401"), (unknown, "404"), (failed, "BackendError"), (broken, "BackendError")):
            assert told(span)["error.type"] == kind
            is_error = span in (failed, broken)
            assert (span.status.code == Status.STATUS_CODE_ERROR) == is_error
        assert denied.name == "POST" and told(denied)["url.path"] == "/v1/completions"
        assert [one.name for one in collector.below(broken)] == ["queue"]


def test_a_caller_that_samples_no_trace_gets_none(open_pair: Callable[[], SpeculativeDecoder]) -> None:
    with collecting() as collector:
        with running(open_pair(), tracing=Tracing(collector.url)) as server:
            for flags in ("00", "01"):
                headers = {"traceparent": f"00-{TRACE}-{CALLER}-{flags}"}
                assert server.post("/v1/completions", {**BODY, "stream": True}, headers=headers).status_code == 200
        assert len(collector.named("text_completion target")) == 1


def test_the_command_sends_traces_and_goes_on_without_a_collector(
    engines: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    with collecting() as collector:
        with serving(engines, "--otlp_traces_endpoint", collector.url) as server:
            assert httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=60).status_code == 200
            server.process.terminate()
            assert server.process.wait(30) == 0
        assert collector.services == {"mine"} and len(collector.named("decode")) == 1
    with serving(engines, "--otlp_traces_endpoint", collector.url) as server:
        assert httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=60).status_code == 200
        server.process.terminate()
        assert server.process.wait(60) == 0


def test_without_the_extra_the_command_names_it(engines: Path) -> None:
    options = [
        "serve",
        str(engines / "target"),
        "--port",
        "0",
        "--otlp_traces_endpoint",
        "http://127.0.0.1:1/v1/traces",
    ]
    code = f"import sys; sys.modules['opentelemetry'] = None; from specrun.cli import main; main({options!r})"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1 and "opentelemetry" in ended.stderr and ".[otel]" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
