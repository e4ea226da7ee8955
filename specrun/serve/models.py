"""Which models of a server are loaded, which requests have them, and who is next where not all have room."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Literal, TypeVar

from specrun.builder import OnStart
from specrun.errors import SpecError
from specrun.kv_cache.host_memory import return_freed
from specrun.serve.engine import EngineStoppedError, EngineThread, QueueFullError, RequestUpdate
from specrun.serve.errors import ApiError
from specrun.serve.log import log, write
from specrun.serve.metrics import MetricFamilies
from specrun.serve.model import LoadedModel, Model, ModelSpec
from specrun.serve.model_entry import ModelEntry
from specrun.serve.model_names import ModelNames

_Result = TypeVar("_Result")


class Models:
    """Owns which models are loaded. Only the event loop may call it.

    A request acquires its model and releases it. A model that sleeps is loaded for the first request; one whose engines
    are not built yet is built first, while the others go on. At most ``max_loaded`` have room, with those that are
    being loaded or closed. One without requests, the least recently used, is put to sleep for one
    that is requested. Where all have requests, the least recently used one takes no further ones. They wait until it
    has slept, or until another one made room. So each request is served in the end.
    """

    def __init__(
        self,
        specs: Sequence[ModelSpec],
        metrics_prefix: str,
        max_loaded: int = 1,
        loaded: Mapping[str, LoadedModel] | None = None,
    ) -> None:
        """loaded: models that are loaded already, by name. The event loop must run."""
        self._loop = asyncio.get_running_loop()
        self._families = MetricFamilies(metrics_prefix)
        self._max_loaded = max_loaded
        self._turns = itertools.count(1)
        self._stopping = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._entries: list[ModelEntry] = []
        """Models that have names, and others until nothing uses them."""
        self.names = ModelNames(self._families)
        self.replace(specs)
        for name, model in (loaded or {}).items():
            self._start_engine(self.names.find(name), model)

    def replace(self, specs: Sequence[ModelSpec]) -> None:
        """Let bodies name only ``specs``. Models that stay equal stay loaded; requests keep theirs."""
        self._entries += self.names.replace(specs)
        self._schedule()

    def acquire(self, name: str | None) -> asyncio.Future[Model]:
        """The model that a body names, as soon as it is loaded. Unless cancelled, it must be released.

        name: None where the body names none. Raises ApiError for an unknown one, QueueFullError and
        EngineStoppedError. The future raises ApiError where the model cannot be loaded.
        """
        entry = self.names.find(name)
        if self._stopping and entry.state != "loaded":
            raise EngineStoppedError("the server is stopping")
        if (waiting := entry.num_waiting) >= entry.spec.max_queue:
            raise QueueFullError(f"{waiting} requests wait until {entry.spec.name!r} is loaded, and no more may")
        if not waiting:
            entry.waiters.clear()
            entry.requested = next(self._turns)
        future: asyncio.Future[Model] = self._loop.create_future()
        future.add_done_callback(lambda done: self._schedule() if done.cancelled() else None)
        entry.waiters.append(future)
        self._schedule()
        return future

    def release(self, model: Model) -> None:
        """A request has no more use for its model."""
        (entry,) = (entry for entry in self._entries if entry.model is model)
        entry.num_users -= 1
        entry.last_used = next(self._turns)
        self._schedule()

    @property
    def loaded(self) -> list[Model]:
        """The models that are loaded."""
        return [entry.model for entry in self._entries if entry.model]

    def problem(self) -> str | None:
        """Why a loaded model does not work; None where all do."""
        problems = [(model.name, model.engine.problem()) for model in self.loaded]
        return next((f"model {name!r}: {problem}" for name, problem in problems if problem), None)

    def require_room(self) -> None:
        """Raise QueueFullError or EngineStoppedError where all loaded models would refuse a request now."""
        refusals: list[SpecError] = []
        for model in self.loaded:
            try:
                model.engine.require_room(1)
            except SpecError as error:
                refusals.append(error)
        if refusals and len(refusals) == len(self.loaded):
            raise refusals[0]

    def metrics(self) -> bytes:
        """The text of ``/metrics``."""
        for name, metrics in self.names.metrics.items():
            entries = [entry for entry in self._entries if entry.spec.name == name]
            waiting = sum(entry.num_waiting for entry in entries)
            metrics.show([entry.model.engine for entry in entries if entry.model], waiting)
        return self._families.text()

    def refuse(self) -> None:
        """Load nothing more, because the server stops. Requests that wait for a model fail, and builds are stopped."""
        self._stopping = True
        for entry in self._entries:
            entry.fail(EngineStoppedError("the server is stopping"))
            entry.stop_build()

    async def stop(self) -> None:
        """Close all models, after those that are being loaded."""
        self.refuse()
        while self._tasks:
            await asyncio.wait(self._tasks)
        engines = [model.engine for model in self.loaded]
        await asyncio.gather(*(asyncio.to_thread(engine.stop, 0.0) for engine in engines))

    # ------------------------------------------------------------------------------------------------ turns

    def _schedule(self) -> None:
        """Close and load models as far as there is room, and give loaded ones to the requests that wait."""
        if not self._stopping:
            for entry in self._leaving():
                if entry.model and not entry.num_users:
                    engine, entry.model = entry.model.engine, None
                    self._begin_task(entry, "closing", self._close(entry, engine))
            for entry in self._waiting():
                if not entry.is_built:
                    self._begin_task(entry, "building", self._build(entry))
            for entry in self._requested()[: max(0, self._num_free())]:
                self._begin_task(entry, "loading", self._load(entry))
        leaving = () if self._stopping else self._leaving()
        for entry in self._entries:
            if entry.state == "loaded" and entry not in leaving:
                entry.give(next(self._turns))
        named = self.names.entries
        self._entries = [
            entry for entry in self._entries if entry in named or entry.state != "asleep" or entry.num_waiting
        ]

    def _waiting(self) -> list[ModelEntry]:
        """Sleeping models that requests wait for, in the order of their first requests."""
        waiting = [entry for entry in self._entries if entry.state == "asleep" and entry.num_waiting]
        return sorted(waiting, key=lambda entry: entry.requested)

    def _requested(self) -> list[ModelEntry]:
        """Those of them that are built, so that others make room for them."""
        return [entry for entry in self._waiting() if entry.is_built]

    def _leaving(self) -> list[ModelEntry]:
        """Loaded models that take no further requests: those without a name, and those that must make room."""
        loaded = [entry for entry in self._entries if entry.state == "loaded"]
        loaded.sort(key=lambda entry: (entry.num_users > 0, entry.last_used))
        named = self.names.entries
        unnamed = [entry for entry in loaded if entry not in named]
        num_closing = sum(
            entry.state == "closing" or (entry in unnamed and not entry.num_users) for entry in self._entries
        )
        num_missing = len(self._requested()) - self._num_free() - num_closing
        return unnamed + [entry for entry in loaded if entry in named][: max(0, num_missing)]

    def _num_free(self) -> int:
        return self._max_loaded - sum(entry.state not in ("asleep", "building") for entry in self._entries)

    # ------------------------------------------------------------------------------------------ loading and closing

    def _begin_task(
        self, entry: ModelEntry, state: Literal["building", "loading", "closing"], work: Coroutine[Any, Any, None]
    ) -> None:
        entry.state = state
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _build(self, entry: ModelEntry) -> None:
        """Build a model's engines while the others go on."""
        assert entry.spec.build
        await self._run(entry, "building", entry.spec.build)
        entry.state = "asleep"
        self._schedule()

    async def _load(self, entry: ModelEntry) -> None:
        began = time.perf_counter()
        if loaded := await self._run(entry, "loading", entry.spec.load):
            self._start_engine(entry, loaded)
            write("loaded", {"model": entry.spec.name, "seconds": round(time.perf_counter() - began, 3)})
        else:
            entry.state = "asleep"
        self._schedule()

    async def _run(self, entry: ModelEntry, event: str, work: Callable[[OnStart], _Result]) -> _Result | None:
        """Run ``work`` for a model in a thread. Where it fails, so do the requests that wait, and None is returned."""
        name = entry.spec.name
        write(event, {"model": name})

        def started(stop: Callable[[], None]) -> None:
            entry.stop_build = stop
            if self._stopping:
                stop()

        try:
            result = await asyncio.to_thread(work, started)
        except Exception as error:
            trace = None if isinstance(error, SpecError) else error
            log.error("model %s cannot be loaded: %s", name, error, exc_info=trace)
            message = f"model {name!r} cannot be loaded; the server's log says why"
            entry.fail(ApiError(503, message, "model", "model_not_loaded"))
            return None
        finally:
            entry.stop_build = lambda: None
        entry.is_built = True
        return result

    def _start_engine(self, entry: ModelEntry, loaded: LoadedModel) -> None:
        """Start the engine of a loaded model. Requests that wait for it get it, even if others wait for room."""
        engine = EngineThread(loaded.decoder, self._deliver, entry.spec.max_queue)
        entry.model = Model(entry.spec, loaded, engine, entry.metrics)
        entry.build_config = loaded.decoder.target.build_config
        entry.state, entry.last_used = "loaded", next(self._turns)
        engine.start()
        entry.give(next(self._turns))

    async def _close(self, entry: ModelEntry, engine: EngineThread) -> None:
        """Put a model without requests to sleep."""
        await asyncio.to_thread(engine.stop, 0.0)
        del engine  # With it the decoder's memory.
        await asyncio.to_thread(return_freed)
        entry.state = "asleep"
        write("asleep", {"model": entry.spec.name})
        self._schedule()

    def _deliver(self, updates: Sequence[RequestUpdate]) -> None:
        """Deliver updates in the event loop. Called in engine threads."""
        self._loop.call_soon_threadsafe(_deliver_all, updates)


def _deliver_all(updates: Sequence[RequestUpdate]) -> None:
    for update in updates:
        update.deliver()
