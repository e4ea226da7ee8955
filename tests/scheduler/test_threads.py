"""Threads that share one decoder: real ones, with cancels, timeouts, closes, errors, Ctrl-C, asyncio and fork."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from specrun.decoder import SpeculativeDecoder
from specrun.errors import BackendError, RequestError
from specrun.request.options import RequestOptions
from specrun.request.request import Request, TokenOutput
from specrun.sampling.sampler import SamplingParams
from tests.helpers.staggered import Widths
from tests.helpers.tables import decode, normal, open_tables

V = 24
LONG = 30.0
"""Seconds after which a thread that still waits will wait for ever."""


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[SpeculativeDecoder]:
    with open_five(tmp_path) as decoder:
        yield decoder


def open_five(directory: Path) -> SpeculativeDecoder:
    tables = (target := normal(1, V, V, scale=2.0), target + normal(2, V, V))
    return open_tables(directory, *tables, weight=5, max_batch_size=5)


class Threads:
    """Threads that are joined at the end of the block; what they raise is raised there."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._errors: list[BaseException] = []

    def start(self, work: Callable[..., object], *arguments: object) -> threading.Thread:
        def run() -> None:
            try:
                work(*arguments)
            except BaseException as error:
                self._errors.append(error)

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()
        return self._threads[-1]

    def __enter__(self) -> Threads:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        for thread in self._threads:
            thread.join(LONG)
        if kind is None:
            assert not any(thread.is_alive() for thread in self._threads), "a thread waits for ever"
            for error in self._errors:
                raise error


class Held:
    """Stops a decoder's rounds: each waits until it is let go."""

    def __init__(self, decoder: SpeculativeDecoder) -> None:
        self.entered, self.go = threading.Event(), threading.Event()
        self._rounds: Any = decoder.scheduler.round
        self._step = self._rounds.step
        vars(self._rounds).update(step=self)

    def __call__(self, *arguments: Any) -> Any:
        self.entered.set()
        assert self.go.wait(LONG)
        return self._step(*arguments)


def sampled(seed: int) -> SamplingParams:
    return SamplingParams(1.0, seed=seed)


def texts(decoder: SpeculativeDecoder, count: int, length: int) -> list[list[int]]:
    """What each seed writes, one text after the other."""
    return [decode(decoder, [Request([seed % V], sampled(seed), length)])[0] for seed in range(count)]


def test_threads_write_what_one_thread_writes(pair: SpeculativeDecoder) -> None:
    expected = texts(pair, 60, 30)
    found: dict[int, list[int]] = {}
    widths = Widths(pair)
    start = threading.Barrier(3)

    def work(first: int) -> None:
        start.wait(LONG)
        for seed in range(first, 60, 3):
            (request,) = pair.generate([[seed % V]], sampled(seed), max_output_len=30)
            found[seed] = request.output

    with Threads() as threads:
        for first in range(3):
            threads.start(work, first)
    assert [found[seed] for seed in range(60)] == expected
    assert max(rows for rows, _ in widths.shapes) > 1, "requests of several threads in one batch"
    assert len(pair.scheduler) == 0


def test_requests_of_two_threads_share_batches(pair: SpeculativeDecoder) -> None:
    """The first thread rests, so the second one's steps must write the first one's text."""
    (expected,) = decode(pair, [Request([3], sampled(1), 20)])
    stream = pair.stream([3], sampled(1), max_output_len=20)
    found = [next(stream).token]
    widths = Widths(pair)
    with Threads() as threads:
        threads.start(lambda: pair.generate([[4]], sampled(2), max_output_len=60))
    assert {rows for rows, _ in widths.shapes} == {1, 2}
    widths.shapes.clear()
    assert [*found, *(piece.token for piece in stream)] == expected
    assert not widths.shapes, "no step was needed any more"


def test_add_and_cancel_never_wait_for_a_step(pair: SpeculativeDecoder) -> None:
    with Threads() as threads:
        held = Held(pair)
        thread = threads.start(lambda: pair.generate([[n] for n in range(5)], max_output_len=9))
        assert held.entered.wait(LONG)
        late = pair.request([3], max_output_len=9)
        pair.scheduler.add(late)
        assert len(pair.scheduler) == 6
        late.cancel()
        assert late.finish_reason == "cancelled"
        assert len(pair.scheduler) == 5
        assert thread.is_alive(), "the step is still under way"
        held.go.set()


def test_what_waits_for_a_row_can_be_cancelled_where_nobody_steps(pair: SpeculativeDecoder) -> None:
    requests = [pair.request([3], max_output_len=9) for _ in range(1000)]
    for request in requests:
        pair.scheduler.add(request)
    for request in requests[::2]:
        request.cancel()
    assert [request.finish_reason for request in requests] == ["cancelled", None] * 500
    assert len(pair.scheduler) == 500
    early = pair.request([3])
    early.cancel()
    pair.scheduler.add(early)
    assert early.finish_reason == "cancelled"


def test_cancel_may_come_from_any_thread(pair: SpeculativeDecoder) -> None:
    request = pair.request([3], max_output_len=4000)
    for event in pair.scheduler.run([request]):
        if len(event.request.token_outputs) > 5:
            with Threads() as threads:
                threads.start(request.cancel)
    assert request.finish_reason == "cancelled"
    assert len(request.output) < 20


def test_a_timeout_ends_what_waits_beside_another_thread(pair: SpeculativeDecoder) -> None:
    late: list[Request] = []
    with Threads() as threads:
        held = Held(pair)
        threads.start(lambda: pair.generate([[n] for n in range(5)], max_output_len=9))
        assert held.entered.wait(LONG)
        threads.start(lambda: late.extend(pair.generate([[3]], timeout=0.01)))
        while len(pair.scheduler) < 6:
            time.sleep(0.001)
        time.sleep(0.02)
        held.go.set()
    assert [(request.finish_reason, request.output) for request in late] == [("timeout", [])]


def test_close_waits_for_a_step_of_another_thread(tmp_path: Path) -> None:
    pair = open_five(tmp_path)
    failed: list[Any] = []

    def listen() -> None:
        for _ in pair.run(requests):
            pass
        failed.extend(str(request.error) for request in requests)

    requests = [pair.request([n], max_output_len=50) for n in range(9)]
    with Threads() as threads:
        held = Held(pair)
        threads.start(listen)
        assert held.entered.wait(LONG)
        closing = threads.start(pair.close)
        closing.join(0.05)
        assert closing.is_alive()
        with pytest.raises(RequestError, match="closed"):
            pair.scheduler.add(pair.request([3]))
        held.go.set()
    assert failed == ["the decoder was closed before this request had ended"] * 9
    assert [len(request.token_outputs) > 0 for request in requests] == [True] * 5 + [False] * 4
    for use in (pair.scheduler.step, lambda: pair.generate([[1]]), lambda: next(pair.stream([1]))):
        with pytest.raises(RequestError, match="the decoder is closed"):
            use()


def test_an_error_in_a_round_fails_its_requests_and_no_others(
    pair: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stepping thread's own requests wait for a row: the error does not concern it."""
    (expected,) = decode(pair, [Request([3], sampled(1), 9)])
    streams = [pair.stream([n], sampled(n), max_output_len=50) for n in range(5)]
    for stream in streams:
        next(stream)
    rounds: Any = pair.scheduler.round
    right, broken = rounds.step, threading.Event()

    def breaking(*arguments: Any) -> Any:
        if not broken.is_set():
            broken.set()
            raise MemoryError("no more")
        return right(*arguments)

    monkeypatch.setattr(rounds, "step", breaking)
    found: list[Request] = []
    with Threads() as threads:
        threads.start(lambda: found.extend(pair.generate([[3]], sampled(1), max_output_len=9)))
    assert [request.output for request in found] == [expected]
    for stream in streams:
        with pytest.raises(BackendError, match="no more"):
            list(stream)
    assert len(pair.scheduler) == 0
    broken.clear()
    with pytest.raises(MemoryError):
        pair.generate([[3]])
    assert decode(pair, [Request([3], sampled(1), 9)]) == [expected]


def test_a_thread_cannot_wait_for_its_own_step(pair: SpeculativeDecoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a signal handler: it would wait for ever."""
    rounds: Any = pair.scheduler.round
    right, said = rounds.step, []

    def inside(*arguments: Any) -> Any:
        for use in (pair.scheduler.step, lambda: pair.generate([[4]])):
            with pytest.raises(RequestError, match="this thread is in a step") as error:
                use()
            said.append(str(error.value))
        return right(*arguments)

    monkeypatch.setattr(rounds, "step", inside)
    pair.generate([[3]], max_output_len=1)
    assert len(said) == 2
    assert len(pair.scheduler) == 0


def test_ctrl_c_at_any_time_leaves_the_decoder_usable(pair: SpeculativeDecoder) -> None:
    """In the main thread, while another one decodes as well."""
    expected = texts(pair, 5, 30)
    generator, over = random.Random(1), threading.Event()
    failed = 0

    def beside() -> None:
        nonlocal failed
        while not over.is_set():
            for seed in range(5):
                request = Request([seed % V], sampled(seed), 30)
                if decode(pair, [request]) != [expected[seed]]:
                    assert "KeyboardInterrupt" in str(request.error)
                    failed += 1
                time.sleep(0.001)  # Else the main thread never has a turn, and waits whenever it is interrupted.

    def interrupt(seconds: float, received: threading.Event) -> None:
        time.sleep(seconds)
        os.kill(os.getpid(), signal.SIGINT)
        while not received.wait(5):  # Python drops what is raised in a weak reference's callback.
            os.kill(os.getpid(), signal.SIGINT)

    with Threads() as threads:
        threads.start(beside)
        try:
            for _ in range(100):
                received = threading.Event()
                with pytest.raises(KeyboardInterrupt):
                    threading.Thread(target=interrupt, args=(generator.uniform(0, 0.02), received)).start()
                    while True:
                        pair.generate([[1]], max_output_len=50)
                received.set()
                again = [Request([seed % V], sampled(seed), 30) for seed in range(5)]
                assert decode(pair, again) == expected
        finally:
            over.set()
    assert failed, "rounds of both threads were interrupted"
    assert len(pair.scheduler) == 0


def some_use(pair: SpeculativeDecoder, expected: list[list[int]], generator: random.Random) -> str:
    """A request of one of many kinds; returns how it ended. Its ids are those that one thread alone writes."""
    seed, how = generator.randrange(len(expected)), generator.choice(["all", "leave", "drop", "cancel", "timeout"])
    right = expected[seed]
    if how in ("leave", "drop"):
        stream = pair.stream([seed % V], sampled(seed), max_output_len=len(right))
        left = [piece.token for piece, _ in zip(stream, range(generator.randrange(1, 12)), strict=False)]
        assert left == right[: len(left)]
        if how == "leave":
            stream.close()  # type: ignore[attr-defined]
        else:  # For the garbage collector, in whatever thread.
            cycle: list[object] = [stream]
            cycle.append(cycle)
        return "left"
    timeout = generator.choice([1e-9, 1e-3, 0.01, 10.0]) if how == "timeout" else None
    request = Request([seed % V], sampled(seed), len(right), options=RequestOptions(timeout=timeout))
    if how == "cancel":
        threading.Timer(generator.uniform(0, 0.01), request.cancel).start()
    shown: list[TokenOutput] = []
    for event in pair.run([request]):
        shown += event.token_outputs
    assert shown == request.token_outputs, "a listener hears of everything"
    assert request.output == right[: len(request.output)]
    assert request.finish_reason != "length" or request.output == right
    return str(request.finish_reason)


def test_threads_that_come_and_go(pair: SpeculativeDecoder) -> None:
    expected, ends = texts(pair, 40, 40), list[str]()

    def work(number: int) -> None:
        generator = random.Random(number)
        for _ in range(60):
            ends.append(some_use(pair, expected, generator))
            if generator.random() < 0.05:
                gc.collect()

    with Threads() as threads:
        for number in range(8):
            threads.start(work, number)
    gc.collect()
    assert {"length", "left", "cancelled", "timeout"} <= set(ends)
    assert texts(pair, 40, 40) == expected
    assert len(pair.scheduler) == 0


def test_decoders_that_are_closed_at_any_time(tmp_path: Path) -> None:
    with open_five(tmp_path) as pair:
        expected = texts(pair, 40, 40)
    generator = random.Random(1)

    def work(pair: SpeculativeDecoder, number: int, ends: list[str]) -> None:
        own = random.Random(number)
        while "closed" not in ends[-1:]:
            try:
                ends.append(some_use(pair, expected, own))
            except RequestError as error:
                assert "closed" in str(error)
                ends.append("closed")

    for _ in range(8):
        with Threads() as threads:
            pair = open_five(tmp_path)
            all_ends: list[list[str]] = [[] for _ in range(4)]
            for number, ends in enumerate(all_ends):
                threads.start(work, pair, number, ends)
            time.sleep(generator.uniform(0, 0.1))
            for _ in range(2):
                threads.start(pair.close)
        assert all(ends[-1] == "closed" for ends in all_ends)
        assert len(pair.scheduler) == 0


def test_in_asyncio(pair: SpeculativeDecoder) -> None:
    expected = texts(pair, 12, 30)
    widths = Widths(pair)

    async def streamed(seed: int) -> list[int]:
        stream, ids = pair.stream([seed % V], sampled(seed), max_output_len=30), []
        while piece := await asyncio.to_thread(next, stream, None):
            ids.append(piece.token)
        return ids

    async def generated(seed: int) -> list[int]:
        (request,) = await asyncio.to_thread(pair.generate, [[seed % V]], sampled(seed), max_output_len=30)
        return list(request.output)

    async def everything() -> list[list[int]]:
        uses = [generated(seed) if seed % 2 else streamed(seed) for seed in range(12)]
        return list(await asyncio.gather(*uses))

    assert asyncio.run(everything()) == expected
    assert max(rows for rows, _ in widths.shapes) > 1


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_process_is_told_to_open_its_own(pair: SpeculativeDecoder) -> None:
    """Even one that was forked in the middle of a step, whose thread does not exist there."""
    requests = [pair.request([n], max_output_len=9) for n in range(6)]
    expected = decode(pair, [pair.request([n], max_output_len=9) for n in range(6)])
    stream = pair.stream([3], max_output_len=50)
    next(stream)

    def in_child() -> None:
        uses: list[Callable[[], object]] = [
            pair.scheduler.step,
            lambda: pair.scheduler.add(pair.request([1])),
            lambda: pair.generate([[1]]),
            lambda: next(stream),
        ]
        for use in uses:
            with pytest.raises(RequestError, match="open a decoder in this process"):
                use()
        requests[5].cancel()
        assert requests[5].finish_reason == "cancelled"
        pair.close()

    with Threads() as threads:
        held = Held(pair)
        threads.start(lambda: decode(pair, requests))
        assert held.entered.wait(LONG)
        child = os.fork()
        if child == 0:
            with suppress(BaseException):
                in_child()
                os._exit(0)
            os._exit(1)
        try:
            status = wait_for(child)
        finally:
            held.go.set()
    assert status == 0
    assert [request.output for request in requests] == expected


def wait_for(child: int) -> int:
    """Its exit status; it is killed where it does not end."""
    until = time.monotonic() + LONG
    while time.monotonic() < until:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    return os.waitpid(child, 0)[1]
