"""Whose turn it is where not all models have room: loads of real engines, which begin and end when the test says so."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest

from specrun.builder import OnStart
from specrun.errors import BackendError
from specrun.serve.engine import EngineStoppedError
from specrun.serve.errors import ApiError
from specrun.serve.model import Model, ModelSpec
from specrun.serve.models import Models
from tests.serve.test_models import Loading

NAMES = ("target", "draft", "padded")


@pytest.fixture
def loads(engines: Path) -> dict[str, Loading]:
    return {name: Loading(engines, name) for name in NAMES}


def run(
    check: Callable[[Models], Awaitable[None]],
    loads: dict[str, Loading],
    max_loaded: int = 1,
    specs: Sequence[ModelSpec] = (),
) -> None:
    async def checked() -> None:
        models = Models(specs or [one.spec() for one in loads.values()], "specrun", max_loaded)
        try:
            await check(models)
        finally:
            for one in loads.values():
                one.may.set()
            await models.stop()

    asyncio.run(checked())


def loaded(models: Models) -> set[str]:
    return {model.name for model in models.loaded}


async def turns() -> None:
    """Let the loop do all that needs no other thread."""
    for _ in range(20):
        await asyncio.sleep(0)


def test_a_build_does_not_hold_the_others_up(loads: dict[str, Loading]) -> None:
    """A model sleeps only when the engines of the one that it makes room for are there."""
    may, begun = threading.Event(), threading.Semaphore(0)

    def build(started: OnStart) -> None:
        started(may.set)
        begun.release()
        assert may.wait(60)

    async def check(models: Models) -> None:
        models.release(await models.acquire("target"))
        other = models.acquire("draft")
        await asyncio.to_thread(begun.acquire)
        for _ in range(2):
            models.release(await models.acquire("target"))
        assert loaded(models) == {"target"} and not other.done()
        may.set()
        assert (await other).name == "draft" and loaded(models) == {"draft"}

    specs = {"target": loads["target"].spec(), "draft": loads["draft"].spec(build=build)}
    run(check, loads, specs=list(specs.values()))


def test_a_build_that_fails_is_an_answer(loads: dict[str, Loading]) -> None:
    def build(_started: OnStart) -> None:
        raise BackendError("no compiler")

    async def check(models: Models) -> None:
        given = await models.acquire("target")
        with pytest.raises(ApiError, match="cannot be loaded"):
            await models.acquire("draft")
        assert loaded(models) == {"target"}
        models.release(given)

    run(check, loads, specs=[loads["target"].spec(), loads["draft"].spec(build=build)])


def test_who_asks_for_a_busy_model_waits_behind_those_that_wait_for_room(loads: dict[str, Loading]) -> None:
    """So requests that come without end keep no other model out."""

    async def check(models: Models) -> None:
        first = await models.acquire("target")
        other = models.acquire("draft")
        second = models.acquire("target")
        await turns()
        assert not other.done() and not second.done() and loaded(models) == {"target"}
        models.release(first)
        given = await other
        assert given.name == "draft" and not second.done() and loaded(models) == {"draft"}
        models.release(given)
        again = await second
        assert again.name == "target" and again is not first
        models.release(again)

    run(check, loads)


def test_the_first_model_that_is_not_used_makes_room(loads: dict[str, Loading]) -> None:
    """Also where it is not the one that was used least recently, which takes requests again from then on."""

    async def check(models: Models) -> None:
        least, most = await models.acquire("target"), await models.acquire("draft")
        third, held_up = models.acquire("padded"), models.acquire("target")
        direct = models.acquire("draft")
        await turns()
        assert not held_up.done() and direct.done(), "one model is enough to make room"
        models.release(most)
        models.release(await direct)
        assert await held_up is least, "it stayed"
        models.release(await third)
        assert loaded(models) == {"target", "padded"}
        for _ in range(2):
            models.release(least)

    run(check, loads, max_loaded=2)


def test_of_those_that_are_not_used_the_least_recently_used_one_makes_room(loads: dict[str, Loading]) -> None:
    async def check(models: Models) -> None:
        long = await models.acquire("target")
        models.release(await models.acquire("draft"))
        models.release(long)  # Asked for before the other one, and used after it.
        models.release(await models.acquire("padded"))
        assert loaded(models) == {"target", "padded"}

    run(check, loads, max_loaded=2)


def test_who_is_given_up_holds_nobody_up(loads: dict[str, Loading]) -> None:
    async def check(models: Models) -> None:
        first = await models.acquire("target")
        other, second = models.acquire("draft"), models.acquire("target")
        await turns()
        assert not second.done()
        other.cancel()
        assert await second is first
        models.release(first)
        models.release(first)
        await turns()
        assert loaded(models) == {"target"} and not loads["draft"].made

    run(check, loads)


def test_who_comes_while_its_model_falls_asleep_gets_it_again(loads: dict[str, Loading]) -> None:
    async def check(models: Models) -> None:
        models.release(await models.acquire("target"))
        other = models.acquire("draft")
        again = models.acquire("target")  # Its engine is being closed.
        assert loaded(models) == set()
        models.release(await other)
        models.release(await again)
        assert len(loads["target"].made) == 2

    run(check, loads)


def test_all_that_ask_are_served_in_the_order_of_their_models(loads: dict[str, Loading]) -> None:
    async def check(models: Models) -> None:
        order: list[str] = []

        async def use(name: str) -> None:
            model: Model = await models.acquire(name)
            order.append(name)
            await asyncio.sleep(0.01)
            models.release(model)

        names = [NAMES[number % 3] for number in range(30)]
        async with asyncio.timeout(120):
            await asyncio.gather(*map(use, names))
        assert order == [name for each in NAMES for name in names if name == each]

    run(check, loads)


def test_a_failed_load_leaves_its_room_to_the_next(loads: dict[str, Loading]) -> None:
    async def check(models: Models) -> None:
        loads["target"].error = BackendError("no such device")
        failing, other = models.acquire("target"), models.acquire("draft")
        with pytest.raises(ApiError, match="cannot be loaded"):
            await failing
        models.release(await other)

    run(check, loads)


def test_who_waits_for_a_model_that_is_taken_off_gets_it(loads: dict[str, Loading]) -> None:
    async def check(models: Models) -> None:
        loads["draft"].may.clear()
        waiting = models.acquire("draft")
        models.replace([loads["target"].spec()])
        loads["draft"].may.set()
        model = await waiting
        assert model.name == "draft" and loaded(models) == {"draft"}
        with pytest.raises(ApiError, match="'target'"):
            models.acquire("draft")
        other = models.acquire("target")
        models.release(model)
        assert (await other).name == "target" and loaded(models) == {"target"}
        models.release(await other)

    run(check, loads)


def test_a_server_that_stops_loads_nothing_more(loads: dict[str, Loading]) -> None:
    """Who has a model keeps it, and builds are stopped: ``started`` was told how."""

    async def check(models: Models) -> None:
        mine = await models.acquire("target")
        loads["draft"].may.clear()
        building, waiting = models.acquire("draft"), models.acquire("padded")
        await asyncio.to_thread(loads["draft"].begun.acquire)
        models.refuse()
        for future in (building, waiting):
            with pytest.raises(EngineStoppedError):
                await future
        assert loads["draft"].may.is_set()
        with pytest.raises(EngineStoppedError):
            models.acquire("padded")
        assert await models.acquire("target") is mine
        await models.stop()
        for name in ("target", "draft"):
            assert loads[name].made[0]() is None or loaded(models)
        with pytest.raises(EngineStoppedError):
            mine.engine.require_room(1)

    run(check, loads, max_loaded=2)
