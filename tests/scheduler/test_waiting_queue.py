"""The order in which requests get rows: calls take turns."""

from __future__ import annotations

import gc
import random
import threading
import weakref

from specrun.request.options import RequestOptions
from specrun.request.request import Request
from specrun.sampling.sampler import SamplingParams
from specrun.scheduler.waiting_queue import RequestQueue


def requests(count: int, timeout: float | None = None) -> list[Request]:
    return [Request([1], SamplingParams(), 1, options=RequestOptions(timeout=timeout)) for _ in range(count)]


def add(queue: RequestQueue, *call: Request) -> None:
    for place, request in enumerate(call):
        request.begin(queue.end)
        queue.add(request, place)


def take(queue: RequestQueue, count: int) -> list[Request]:
    taken = []
    for _ in range(count):
        request = queue.first()
        assert request is not None and queue.take(request)
        taken.append(request)
    return taken


def test_single_requests_are_taken_in_the_order_in_which_they_came() -> None:
    queue, singles = RequestQueue(), requests(20)
    for request in singles:
        add(queue, request)
    assert take(queue, 20) == singles
    assert queue.first() is None and len(queue) == 0


def test_who_comes_alone_does_not_wait_for_all_of_another_call() -> None:
    queue, many = RequestQueue(), requests(100)
    add(queue, *many)
    assert take(queue, 10) == many[:10], "the order of a call is kept"
    (late,) = requests(1)
    add(queue, late)
    assert late in take(queue, 2)


def test_two_calls_take_turns() -> None:
    queue, one, other = RequestQueue(), requests(5), requests(5)
    add(queue, *one)
    add(queue, *other)
    assert take(queue, 10) == [request for pair in zip(one, other, strict=True) for request in pair]


def test_nobody_waits_for_ever() -> None:
    """However many come alone meanwhile, at least one of nine that are taken is the call's."""
    queue, many = RequestQueue(), requests(20)
    add(queue, *many)
    for _ in range(9 * 20):
        add(queue, *requests(1))
        if many[-1] in take(queue, 1):
            return
    raise AssertionError


def test_cancelled_requests_give_no_turn_and_take_no_memory() -> None:
    queue, many = RequestQueue(), requests(1000)
    add(queue, *many)
    first, cancelled = many[0], [weakref.ref(request) for request in many[1:]]
    while len(many) > 1:
        many.pop().cancel()
    assert len(queue) == 1
    (late,) = requests(1)
    add(queue, late)
    assert queue.first() is first
    gc.collect()
    assert not any(request() for request in cancelled)
    assert take(queue, 2) == [first, late]
    assert queue.first() is None


def test_threads_add_take_and_cancel() -> None:
    """Every request is taken once, or cancelled and not taken."""
    queue, made, taken = RequestQueue(), list[Request](), list[Request]()
    done = threading.Event()

    def produce(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(200):
            call = requests(draw.randint(1, 5))
            made.extend(call)
            add(queue, *call)
            if draw.random() < 0.3:
                draw.choice(call).cancel()
            gc.collect(0)

    def consume() -> None:
        while not done.is_set() or len(queue):  # In this order: nothing is added once it is set.
            if (request := queue.first()) and queue.take(request):
                taken.append(request)

    consumer = threading.Thread(target=consume)
    producers = [threading.Thread(target=produce, args=(seed,)) for seed in range(3)]
    for thread in (consumer, *producers):
        thread.start()
    for thread in producers:
        thread.join()
    done.set()
    consumer.join()
    cancelled = {id(request) for request in made if request.finish_reason == "cancelled"}
    assert len({id(request) for request in taken}) == len(taken)
    assert {id(request) for request in taken} | cancelled == {id(request) for request in made}
    assert cancelled
