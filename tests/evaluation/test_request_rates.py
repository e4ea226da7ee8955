"""Requests that come at random times: when, how many at once, and what is counted."""

from __future__ import annotations

import io
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from specrun.decoder import SpeculativeDecoder
from specrun.errors import RequestError
from specrun.evaluation.arrivals import arrival_times, decode_arriving
from specrun.evaluation.bench import bench
from specrun.evaluation.bench_results import vllm_names
from specrun.evaluation.bench_settings import BenchSettings
from specrun.evaluation.bench_tables import table
from specrun.request.request import Request
from specrun.sampling.sampler import SamplingParams
from tests.helpers.tables import normal, open_tables, save_table_engine

TARGET = normal(1, 8, 8)


def test_times_are_a_poisson_process() -> None:
    """Gaps are exponential: their mean and their deviation are 1 / rate. A seed and a repetition decide them."""
    settings = BenchSettings(request_rate=5.0, params=SamplingParams(seed=3))
    times = arrival_times(20_000, settings, 1)
    assert times is not None
    gaps = np.diff([0.0, *times])
    assert gaps.min() > 0
    assert gaps.mean() == pytest.approx(0.2, rel=0.03)
    assert gaps.std() == pytest.approx(0.2, rel=0.03)
    assert times == arrival_times(20_000, settings, 1) != arrival_times(20_000, settings, 2)
    assert arrival_times(3, BenchSettings(), 1) is None


def test_requests_come_at_their_times(tmp_path: Path) -> None:
    """None has a token before it came, each has all its tokens, and no thread is left."""
    arrivals, seen = [0.1, 0.0, 0.2], dict[Request, float]()
    before, began = threading.active_count(), time.perf_counter()
    with open_tables(tmp_path, TARGET, TARGET) as decoder:
        requests = [Request([0], SamplingParams(), 10) for _ in arrivals]
        for event in decode_arriving(decoder, requests, arrivals):
            seen.setdefault(event.request, time.perf_counter() - began)
    assert all(seen[request] >= arrival for request, arrival in zip(requests, arrivals, strict=True))
    assert [request.output for request in requests] == [requests[0].output] * 3
    assert len(requests[0].output) == 10
    assert threading.active_count() == before


def test_an_error_ends_all(tmp_path: Path) -> None:
    """A request that begins a second time is refused; the one behind it does not begin."""
    with open_tables(tmp_path, TARGET, TARGET) as decoder:
        again, late = Request([0], SamplingParams(), 10), Request([0], SamplingParams(), 10)
        assert list(decoder.run([again]))
        with pytest.raises(RequestError, match="make another one"):
            for _ in decode_arriving(decoder, [again, late], [0.0, 0.3]):
                pass
    assert late.finish_reason and not late.output


def test_bench_with_a_request_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At most a batch decodes at a time; times are from arrivals, and are in the table and under vLLM's names."""
    running = []
    step = SpeculativeDecoder.run

    def run(self: SpeculativeDecoder, requests: list[Request]) -> object:
        for event in step(self, requests):
            running.append(self.scheduler.num_running)
            yield event

    monkeypatch.setattr(SpeculativeDecoder, "run", run)
    target, draft = (save_table_engine(tmp_path / name, TARGET, max_batch_size=4) for name in ("target", "draft"))
    settings = BenchSettings([2], output_len=20, repetitions=2, request_rate=300.0)
    (result,) = bench(target, draft, [[number % 8] for number in range(12)], settings)
    assert max(running) == 2, "of four rows that the engine has"
    assert result.identical_ids and result.output_tokens == 20
    assert result.split is None, "requests come while others decode"
    assert result.request_ms and result.first_token_ms_p99
    assert 0 < result.first_token_ms.median < result.request_ms.median
    names = vllm_names(result)
    assert (names["request_rate"], names["mean_e2el_ms"]) == (300.0, result.request_ms.median)
    console = Console(file=io.StringIO(), record=True, width=80)
    console.print(table([result]))
    assert "Requests come at 300 a second on average" in console.export_text()
