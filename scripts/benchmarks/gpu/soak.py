"""Thousands of rounds of requests that come and go: nothing may be left of them, and ids stay what they were."""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable
from dataclasses import replace

from scripts.benchmarks.gpu.results import Figures, OutOfTime, Results
from scripts.benchmarks.gpu.timing import cuda_device
from specrun.decoder import SpeculativeDecoder
from specrun.request.request import Request
from specrun.sampling.sampler import SamplingParams

_MANNERS = (
    SamplingParams(),
    SamplingParams(0.9),
    SamplingParams(0.8, top_k=50, top_p=0.9),
    SamplingParams(1.1, presence_penalty=0.5, frequency_penalty=0.2),
)
_SOONEST = 200
"""Rounds before free memory counts: contexts, recordings and tables of penalties are made in the first ones."""
_WRITTEN_EVERY = 500


def soak(
    results: Results, open_decoder: Callable[[bool], SpeculativeDecoder], rounds: int, ids: tuple[int, int]
) -> None:
    """So many recorded rounds, then a tenth of them in pieces, whose ids are compared. ids: of the prompts' tokens."""
    found: dict[str, dict[int, str]] = {}
    for name, graphs, count in (("graphs", True, rounds), ("pieces", False, max(1, rounds // 10))):
        outputs = found[name] = {}

        def run(part: Results, graphs: bool = graphs, count: int = count, outputs: dict[int, str] = outputs) -> None:
            with open_decoder(graphs) as decoder:
                _run(part, decoder, count, ids, outputs)

        results.attempt(name, run)
    both = found["graphs"].keys() & found["pieces"].keys()
    same = sum(found["graphs"][number] == found["pieces"][number] for number in both)
    results.put(compared=len(both), identical=same)


def _run(
    results: Results, decoder: SpeculativeDecoder, count: int, ids: tuple[int, int], outputs: dict[int, str]
) -> None:
    device = cuda_device(decoder)
    generator, began, rounds, tokens = random.Random(0), time.perf_counter(), 0, 0
    running: dict[int, Request] = {}
    memory: Figures = {}
    number = 0

    def report() -> None:
        memory["free_bytes"] = device.free_memory()[0]
        seconds = time.perf_counter() - began
        results.put(rounds=rounds, ended=len(outputs), tokens=tokens, seconds=seconds, **memory)

    def collect() -> int:
        """Requests that have ended; their tokens."""
        ended = [key for key, request in running.items() if request.finish_reason]
        total = 0
        for key in ended:
            request = running.pop(key)
            if request.error:
                raise request.error
            total += len(request.output)
            outputs[key] = hashlib.sha256(repr(request.output).encode()).hexdigest()
        return total

    try:
        while rounds < count:
            results.require_time()
            if len(running) < 2 * decoder.max_batch_size and generator.random() < 0.5:
                running[number] = _request(number, ids, decoder.target.build_config.max_seq_len)
                decoder.scheduler.add(running[number])
                number += 1
            if running:
                decoder.scheduler.step()
                rounds += 1
            tokens += collect()
            if rounds == min(_SOONEST, count):
                memory.setdefault("free_bytes_at_first", device.free_memory()[0])
            if rounds % _WRITTEN_EVERY == 0:
                report()
    except OutOfTime:
        report()
        raise
    while len(decoder.scheduler):
        decoder.scheduler.step()
    tokens += collect()
    report()


def _request(number: int, ids: tuple[int, int], max_seq_len: int) -> Request:
    """What it is depends on nothing but its number. Every third begins like others."""
    generator = random.Random(number)
    beginning = [ids[0] + place % (ids[1] - ids[0]) for place in range(32)] if number % 3 == 0 else []
    own = [generator.randrange(*ids) for _ in range(generator.randint(1, 24))]
    params = replace(_MANNERS[number % len(_MANNERS)], seed=number)
    prompt = [*beginning, *own][: max_seq_len // 2]
    return Request(prompt, params, generator.randint(4, min(40, max_seq_len - len(prompt))))
