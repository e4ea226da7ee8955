"""Metrics in Triton's /metrics, with the names of ``specrun serve``."""

from __future__ import annotations

from typing import Any

import triton_python_backend_utils as pb_utils

from specrun.request.updates import Ended
from specrun.serve.log import log


class TritonMetrics:
    """Counts the tokens and requests of one model. Only the response thread may call it."""

    def __init__(self, model: str) -> None:
        self._labels = {"model_name": model}
        self._families: dict[str, Any] = {}
        self._metrics: dict[tuple[str, str], Any] = {}
        counters = {
            "request_success_total": "Requests that ended.",
            "prompt_tokens_total": "Tokens of prompts.",
            "prefix_cache_hits_total": "Prompt tokens found in the prefix cache.",
            "generation_tokens_total": "Tokens of output.",
            "spec_decode_num_draft_tokens_total": "Draft tokens.",
            "spec_decode_num_accepted_tokens_total": "Accepted draft tokens.",
        }
        try:
            for name, description in counters.items():
                self._families[name] = pb_utils.MetricFamily(
                    name=f"specrun:{name}", description=description, kind=pb_utils.MetricFamily.COUNTER
                )
        except Exception as error:  # tritonserver --allow-metrics=false
            log.warning("no metrics: %s", error)
            self._families = {}

    def count_end(self, ended: Ended, prompt_tokens: int) -> None:
        """Count a request that has ended."""
        self._add("request_success_total", 1, ended.reason)
        self._add("prompt_tokens_total", prompt_tokens)
        self._add("prefix_cache_hits_total", ended.stats.cached)
        self._add("generation_tokens_total", ended.output_tokens)
        self._add("spec_decode_num_draft_tokens_total", ended.stats.drafted)
        self._add("spec_decode_num_accepted_tokens_total", ended.stats.accepted)

    def _add(self, name: str, count: int, reason: str = "") -> None:
        if (family := self._families.get(name)) is None:
            return
        if (name, reason) not in self._metrics:
            labels = self._labels | ({"finished_reason": reason} if reason else {})
            self._metrics[name, reason] = family.Metric(labels=labels)
        self._metrics[name, reason].increment(count)
