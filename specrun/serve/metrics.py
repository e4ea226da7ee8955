"""Prometheus metrics under the names that vLLM gives them, with a prefix of our own.

https://docs.vllm.ai/en/latest/design/metrics.html
"""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from specrun.request.updates import Ended, Update
from specrun.serve.engine import EngineThread

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)


class Metrics:
    """Counts what the event loop sees. The gauges are read from the engine when metrics are requested."""

    def __init__(self, prefix: str, model: str) -> None:
        """prefix: of every name, as in ``specrun:num_requests_running``. model: the label ``model_name``."""
        self._prefix, self._model, self._registry = prefix, model, CollectorRegistry()
        self._running = self._gauge("num_requests_running", "Requests that have a row.")
        self._waiting = self._gauge("num_requests_waiting", "Requests that wait for a row.")
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
        self._accepted_at = Counter(
            f"{prefix}:spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens at each place of a round.",
            ["model_name", "position"],
            registry=self._registry,
        )
        self._ended = Counter(
            f"{prefix}:request_success",
            "Requests that ended.",
            ["model_name", "finished_reason"],
            registry=self._registry,
        )
        self._queue_time = self._histogram("request_queue_time_seconds", "Waiting for a row.", _SECONDS)
        self._first_token = self._histogram("time_to_first_token_seconds", "To the first token.", _SECONDS)
        self._between = self._histogram("inter_token_latency_seconds", "Between the tokens of a request.", _SECONDS)
        self._whole = self._histogram("e2e_request_latency_seconds", "Whole requests.", _SECONDS)
        self._prompt_sizes = self._histogram("request_prompt_tokens", "Tokens of prompts.", _TOKENS)
        self._output_sizes = self._histogram("request_generation_tokens", "Tokens of output.", _TOKENS)

    def count_round(self, update: Update, seconds: float, is_first: bool) -> None:
        """Count the tokens of a round or more. seconds: since the request's last tokens, or since it came."""
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
        """Count a request that has ended. seconds: since it came."""
        self._ended.labels(self._model, ended.reason).inc()
        self._prompt_tokens.inc(prompt_tokens)
        self._prefix_queries.inc(prompt_tokens)
        self._prefix_hits.inc(ended.stats.cached)
        self._prompt_sizes.observe(prompt_tokens)
        self._output_sizes.observe(ended.output_tokens)
        self._queue_time.observe(ended.stats.queue_seconds)
        self._whole.observe(seconds)

    def page(self, engine: EngineThread) -> bytes:
        """What ``/metrics`` answers: ``text`` with what the engine does now."""
        self._running.set(engine.num_running)
        self._waiting.set(engine.num_waiting)
        self._cache_usage.set(engine.cache_usage)
        return self.text()

    def text(self) -> bytes:
        """The counts, in Prometheus' text format."""
        return generate_latest(self._registry)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(f"{self._prefix}:{name}", text, ["model_name"], registry=self._registry).labels(self._model)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(f"{self._prefix}:{name}", text, ["model_name"], registry=self._registry).labels(self._model)

    def _histogram(self, name: str, text: str, buckets: Sequence[float]) -> Histogram:
        made = Histogram(f"{self._prefix}:{name}", text, ["model_name"], registry=self._registry, buckets=buckets)
        return made.labels(self._model)
