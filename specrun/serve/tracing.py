"""Traces of requests for OpenTelemetry: a span for each, with child spans of its answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specrun import __version__
from specrun.openai.answers import Answer, usage
from specrun.openai.body import OpenAIBody
from specrun.request.stats import Stats
from specrun.serve.log import shown

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider

SERVICE = "specrun"
_SECOND = 10**9
"""Nanoseconds, the unit of spans, in a second."""


@dataclass
class TracedAnswers:
    """The answers of a traced request. Traces do not contain their texts."""

    model: str
    body: OpenAIBody
    answers: Sequence[Answer]
    began: int = 0
    """Time of their submission to the engine, in nanoseconds."""

    def attributes(self) -> dict[str, Any]:
        """Attributes of the request's span: https://opentelemetry.io/docs/specs/semconv/gen-ai/gen-ai-spans."""
        params, totals = self.body.params, usage(self.answers, self.body.n)
        longest = self.body.options.max_output_len
        return {
            "gen_ai.provider.name": SERVICE,
            "gen_ai.request.model": shown(self.body.model or self.model),
            "gen_ai.response.model": self.model,
            "gen_ai.request.stream": self.body.stream,
            "gen_ai.request.choice.count": self.body.n,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.request.top_k": float(params.top_k),
            **({"gen_ai.request.max_tokens": longest} if isinstance(longest, int) else {}),
            **({} if params.seed is None else {"gen_ai.request.seed": params.seed}),
            "gen_ai.usage.input_tokens": totals["prompt_tokens"],
            "gen_ai.usage.output_tokens": totals["completion_tokens"],
            "gen_ai.usage.cache_read.input_tokens": totals["prompt_tokens_details"]["cached_tokens"],
            "gen_ai.response.finish_reasons": [answer.finish_reason for answer in self.answers if answer.finish_reason],
        }

    def error(self) -> str | None:
        """The kind of the error that ended an answer."""
        errors = [answer.ended.error for answer in self.answers if answer.ended and answer.ended.error]
        return type(errors[0]).__name__ if errors else None

    def child_spans(self) -> Iterator[tuple[str, int, int, dict[str, Any]]]:
        """Names, beginnings, ends and attributes of the child spans."""
        for number, answer in enumerate(self.answers):
            if answer.ended is None:
                continue
            stats, index = answer.ended.stats, {"specrun.choice.index": number}
            row, first, last = (
                self.began + int(seconds * _SECOND)
                for seconds in (stats.queue_seconds, stats.first_token_seconds, stats.seconds)
            )
            yield "queue", self.began, row, index
            if stats.rounds:
                prompt = len(answer.request.prompt)
                read = {"gen_ai.usage.input_tokens": prompt, "gen_ai.usage.cache_read.input_tokens": stats.cached}
                yield "prefill", row, first, index | read
                yield "decode", first, last, index | _decoded(stats, answer.ended.output_tokens)


def _decoded(stats: Stats, tokens: int) -> dict[str, Any]:
    """Attributes of a decode span, from ``Stats``."""
    return {
        "gen_ai.usage.output_tokens": tokens,
        "specrun.rounds": stats.rounds,
        "specrun.draft.proposed_tokens": stats.drafted,
        "specrun.draft.evaluated_tokens": stats.evaluated,
        "specrun.draft.accepted_tokens": stats.accepted,
        "specrun.draft.tokens_per_round": stats.tokens_per_round,
        **({} if stats.acceptance_rate is None else {"specrun.draft.acceptance_rate": stats.acceptance_rate}),
    }


class Tracing:
    """Sends spans to a collector, in a thread of the SDK. The environment's ``OTEL_*`` variables apply."""

    def __init__(self, endpoint: str) -> None:
        """endpoint: the URL of a collector's OTLP over HTTP, as http://127.0.0.1:4318/v1/traces. Raises ImportError."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create({"service.name": SERVICE, "service.version": __version__})
        self._provider: TracerProvider = TracerProvider(resource=resource.merge(OTELResourceDetector().detect()))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        self._tracer = self._provider.get_tracer(SERVICE, __version__)

    def record(
        self,
        method: str,
        path: str,
        headers: Mapping[bytes, str],
        began: int,
        ended: int,
        status: int,
        identity: str,
        answers: TracedAnswers | None,
    ) -> None:
        """Record a finished request, and its answers if it asked for any.

        headers: may name the parent span (``traceparent``). began, ended: times in nanoseconds. status: 0 if the
        client left before. identity: its ``x-request-id``.
        """
        from opentelemetry import trace

        operation = "text_completion" if path == "/v1/completions" else "chat"
        attributes: dict[str, Any] = {"http.request.method": shown(method), "url.path": shown(path)}
        attributes |= {"http.response.status_code": status} if status else {}
        attributes["http.response.header.x-request-id"] = [identity]
        if answers:
            attributes |= {"gen_ai.operation.name": operation, **answers.attributes()}
        error = (answers and answers.error()) or (
            "client_left" if status == 0 else str(status) if status >= 400 else ""
        )
        if error:
            attributes["error.type"] = error
        name = f"{operation} {answers.model}" if answers else shown(method)
        parent = _parent_context(headers)
        span = self._tracer.start_span(name, parent, trace.SpanKind.SERVER, attributes, start_time=began)
        if error and (status < 400 or status >= 500):
            span.set_status(trace.StatusCode.ERROR)
        context = trace.set_span_in_context(span)
        for part, start, end, values in answers.child_spans() if answers else ():
            self._tracer.start_span(part, context, attributes=values, start_time=start).end(end)
        span.end(ended)

    async def stop(self) -> None:
        """Send the remaining spans."""
        await asyncio.to_thread(self._provider.shutdown)


def _parent_context(headers: Mapping[bytes, str]) -> Context:
    """The caller's span, by W3C's ``traceparent`` and ``tracestate``."""
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({name.decode("latin-1"): value for name, value in headers.items()})
