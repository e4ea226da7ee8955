"""Requests that come at random times, as on a server."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from queue import SimpleQueue
from threading import Thread

import numpy as np

from specrun.decoder import SpeculativeDecoder
from specrun.evaluation.bench_settings import BenchSettings
from specrun.request.request import Request
from specrun.scheduler.scheduler import Event


def arrival_times(count: int, settings: BenchSettings, repetition: int) -> list[float] | None:
    """Seconds from the beginning at which ``count`` requests come, a Poisson process; None: all are there at once."""
    if settings.request_rate is None:
        return None
    generator = np.random.default_rng([settings.params.seed or 0, repetition])
    times: list[float] = generator.exponential(1 / settings.request_rate, count).cumsum().tolist()
    return times


def decode_arriving(
    decoder: SpeculativeDecoder, requests: Sequence[Request], arrivals: Sequence[float]
) -> Iterator[Event]:
    """The events of requests that come at ``arrivals``. Each has a thread, as on a server.

    Raises what decoding raises.
    """
    began, events = time.perf_counter(), SimpleQueue[Event | Exception]()

    def decode(request: Request, arrival: float) -> None:
        time.sleep(max(0.0, began + arrival - time.perf_counter()))
        try:
            for event in decoder.run([request]):
                events.put(event)
        except Exception as error:
            events.put(error)

    threads = [Thread(target=decode, args=pair) for pair in zip(requests, arrivals, strict=True)]
    for thread in threads:
        thread.start()
    left = len(requests)
    try:
        while left:
            event = events.get()
            if isinstance(event, Exception):
                raise event
            left -= event.finish_reason is not None
            yield event
    finally:
        for request in requests:
            request.cancel()
        for thread in threads:
            thread.join()
