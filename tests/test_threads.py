"""A decoder is one thread's at a time: a second one is told so, and harms nothing."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from specrun.decoder import SpeculativeDecoder
from specrun.errors import RequestError
from specrun.request import Request
from specrun.sampling import SamplingParams
from tests.tables import decode, normal, open_tables

V = 24


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[SpeculativeDecoder]:
    tables = (target := normal(1, V, V, scale=2.0), target + normal(2, V, V))
    with open_tables(tmp_path, *tables, weight=5, max_batch_size=5) as decoder:
        yield decoder


def in_a_thread(work: Callable[[], Any]) -> Any:
    """What ``work`` returns or raises in a thread of its own."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, name="second")
    thread.start()
    thread.join()
    return found[0]


def test_a_second_thread_gets_an_error_while_the_first_decodes(pair: SpeculativeDecoder) -> None:
    expected = [piece.token for piece in pair.stream([3], max_output_len=20)]
    stream = pair.stream([3], max_output_len=20)
    found = [next(stream).token]
    uses: list[Callable[[], Any]] = [
        lambda: pair.generate([[4]]),
        lambda: next(pair.stream([4])),
        pair.scheduler.step,
        lambda: pair.scheduler.add(pair.request([4])),
        pair.close,
    ]
    for use in uses:
        error = in_a_thread(use)
        assert isinstance(error, RequestError)
        assert "thread 'MainThread' is decoding" in str(error) and "'second' must wait" in str(error)
        found.append(next(stream).token)
    assert [*found, *(piece.token for piece in stream)] == expected


def test_threads_may_take_turns(pair: SpeculativeDecoder) -> None:
    (here,) = pair.generate([[3]], max_output_len=9)
    (there,) = in_a_thread(lambda: pair.generate([[3]], max_output_len=9))
    assert here.output == there.output
    stream = pair.stream([3], max_output_len=9)
    next(stream)
    stream.close()  # type: ignore[attr-defined]
    assert in_a_thread(lambda: pair.generate([[3]], max_output_len=9))[0].output == here.output
    in_a_thread(lambda: pair.scheduler.add(pair.request([5])))
    assert pair.generate([[3]], max_output_len=9)[0].output == here.output, "the other thread has ended"


def test_many_threads_at_once_get_right_texts_or_an_error(pair: SpeculativeDecoder) -> None:
    params = [SamplingParams(1.0, seed=n) for n in range(40)]
    expected = [decode(pair, [Request([n % V], p, 30)])[0] for n, p in enumerate(params)]
    found: list[Any] = [None] * len(params)

    def work(first: int) -> None:
        for number in range(first, len(params), 4):
            try:
                found[number] = decode(pair, [Request([number % V], params[number], 30)])[0]
            except RequestError as error:
                found[number] = error

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    texts = [ids for ids in found if not isinstance(ids, RequestError)]
    assert texts
    assert all(ids == own for ids, own in zip(found, expected, strict=True) if not isinstance(ids, RequestError))


def test_cancel_may_come_from_any_thread(pair: SpeculativeDecoder) -> None:
    stream_of = pair.request([3], max_output_len=4000)
    for event in pair.scheduler.run([stream_of]):
        if len(event.request.pieces) > 5:
            in_a_thread(stream_of.cancel)
    assert stream_of.finish_reason == "cancelled"
    assert len(stream_of.output) < 20


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_after_a_fork_the_child_may_close_what_its_parent_uses(pair: SpeculativeDecoder) -> None:
    """A thread that was decoding does not exist in the child."""
    ready, go = threading.Event(), threading.Event()

    def work() -> None:
        stream = pair.stream([3], max_output_len=50)
        next(stream)
        ready.set()
        go.wait(10)

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait(10)
    child = os.fork()
    if child == 0:
        try:
            with pair.scheduler._one_thread:
                os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    go.set()
    thread.join()
