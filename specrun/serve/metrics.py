"""Prometheus metrics with vLLM's names and a prefix.

https://docs.vllm.ai/en/latest/design/metrics.html
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from specrun.request.updates import Ended, Update
from specrun.serve.engine import EngineThread

_Kind = TypeVar("_Kind", Counter, Gauge, Histogram)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class MetricFamilies:
    """The metric families of all models. The first model that uses one declares it."""

    def __init__(self, prefix: str) -> None:
        """prefix: beginning of every name, as in ``specrun:num_requests_running``."""
        self._prefix, self._registry = prefix, CollectorRegistry()
        self._families: dict[str, Any] = {}

    def get(self, kind: type[_Kind], name: str, text: str, *labels: str, **options: Any) -> _Kind:
        """The family of a name, with the labels ``model_name`` and ``labels``."""
        if name not in self._families:
            full_name = f"{self._prefix}:{name}"
            self._families[name] = kind(full_name, text, ["model_name", *labels], registry=self._registry, **options)
        family: _Kind = self._families[name]
        return family

    def text(self) -> bytes:
        """All of them, in Prometheus' text format."""
        return generate_latest(self._registry)


class Metrics:
    """Counts the tokens and requests of one model. ``show`` reads the gauges from its engines."""

    def __init__(self, families: MetricFamilies, model: str) -> None:
        """model: the label ``model_name``."""
        self._families, self._model = families, model
        self._loaded = self._gauge("model_loaded", "1 where the model is loaded, 0 where it sleeps.")
        self._running = self._gauge("num_requests_running", "Requests that have a row.")
        self._waiting = self._gauge("num_requests_waiting", "Requests that wait for a row, or for the model.")
        self._cache_usage = self._gauge(
            "kv_cache_usage_perc", "Share of the KV cache that requests have taken, 0 to 1."
        )
        self._prompt_tokens = self._counter("prompt_tokens", "Tokens of prompts.")
        self._output_tokens = self._counter("generation_tokens", "Tokens of output.")
        self._prefix_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._prefix_hits = self._counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._rounds = self._counter("spec_decode_num_drafts", "Rounds with draft tokens.")
        self._drafted = self._counter("spec_decode_num_draft_tokens", "Draft tokens.")
        self._accepted = self._counter("spec_decode_num_accepted_tokens", "Accepted draft tokens.")
        self._accepted_at = families.get(
            Counter,
            "spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens at each place of a round.",
            "position",
        )
        self._ended = families.get(Counter, "request_success", "Requests that ended.", "finished_reason")
        self._queue_time = self._histogram("request_queue_time_seconds", "Waiting for a row.", _SECONDS)
        self._first_token = self._histogram("time_to_first_token_seconds", "To the first token.", _SECONDS)
        self._between = self._histogram("inter_token_latency_seconds", "Between the tokens of a request.", _SECONDS)
        self._whole = self._histogram("e2e_request_latency_seconds", "Whole requests.", _SECONDS)
        self._prompt_sizes = self._histogram("request_prompt_tokens", "Tokens of prompts.", _TOKENS)
        self._output_sizes = self._histogram("request_generation_tokens", "Tokens of output.", _TOKENS)

    def count_round(self, update: Update, seconds: float, is_first: bool) -> None:
        """Count the tokens of a round or more. seconds: since the request's last tokens, or since its arrival."""
        tokens = len(update.token_outputs)
        self._output_tokens.inc(tokens)
        (self._first_token if is_first else self._between).observe(seconds if is_first else seconds / tokens)
        for drafted, accepted in update.steps:
            self._rounds.inc()
            self._drafted.inc(drafted)
            self._accepted.inc(accepted)
            for position in range(accepted):
                self._accepted_at.labels(self._model, str(position)).inc()

    def count_end(self, ended: Ended, prompt_tokens: int, seconds: float) -> None:
        """Count a request that has ended. seconds: since its arrival."""
        self._ended.labels(self._model, ended.reason).inc()
        self._prompt_tokens.inc(prompt_tokens)
        self._prefix_queries.inc(prompt_tokens)
        self._prefix_hits.inc(ended.stats.cached)
        self._prompt_sizes.observe(prompt_tokens)
        self._output_sizes.observe(ended.output_tokens)
        self._queue_time.observe(ended.stats.queue_seconds)
        self._whole.observe(seconds)

    def show(self, engines: Sequence[EngineThread], num_waiting: int) -> None:
        """Set the gauges from the model's engines. It has none while it sleeps.

        num_waiting: requests that wait until the model is loaded.
        """
        self._loaded.set(bool(engines))
        self._running.set(sum(engine.num_running for engine in engines))
        self._waiting.set(num_waiting + sum(engine.num_waiting for engine in engines))
        self._cache_usage.set(max((engine.cache_usage for engine in engines), default=0))

    def _gauge(self, name: str, text: str) -> Gauge:
        return self._families.get(Gauge, name, text).labels(self._model)

    def _counter(self, name: str, text: str) -> Counter:
        return self._families.get(Counter, name, text).labels(self._model)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        return self._families.get(Histogram, name, text, buckets=buckets).labels(self._model)
