"""The models of a server: which are loaded, who uses them, and whose turn it is where not all have room."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Literal

from specrun.arguments import show
from specrun.errors import SpecError
from specrun.kv_cache.host_memory import return_freed
from specrun.serve.engine import EngineStoppedError, EngineThread, QueueFullError, RequestUpdate
from specrun.serve.errors import ApiError
from specrun.serve.log import log, write
from specrun.serve.metrics import MetricFamilies, Metrics
from specrun.serve.model import LoadedModel, Model, ModelSpec
from specrun.serve.model_entry import ModelEntry


class Models:
    """Owns which models are loaded. Of the event loop alone.

    A request asks for its model and has it until it gives it back. A model that sleeps is loaded for the first request.
    At most ``max_loaded`` have room, also those that are being loaded or closed: one that no request has, the least
    recently used, is put to sleep for one that is asked for. Where requests have all of them, the least recently used
    takes no further ones, which wait until it has slept, or until another one made room. So each is served in the end.
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
        self._metrics: dict[str, Metrics] = {}
        """Metrics by name, of models that were here as well."""
        self._max_loaded = max_loaded
        self._turns = itertools.count(1)
        self._stopping = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._entries: list[ModelEntry] = []
        self._by_name: dict[str, ModelEntry] = {}
        """Models that bodies may name, by names and aliases. The others in ``_entries`` go when they are not used."""
        self.created = int(time.time())
        self.replace(specs)
        for name, one in (loaded or {}).items():
            self._begin(self._by_name[name], one)

    def replace(self, specs: Sequence[ModelSpec]) -> None:
        """From now on bodies may name ``specs``. Models that stay equal stay loaded; requests keep what they have."""
        known = {entry.spec.name: entry for entry in self._by_name.values()}
        self._by_name = {}
        for spec in specs:
            entry = known.get(spec.name)
            if entry is None or entry.spec != spec:
                entry = ModelEntry(spec, self._metrics_of(spec.name))
                self._entries.append(entry)
            entry.spec = spec
            self._by_name |= dict.fromkeys((spec.name, *spec.aliases), entry)
        self._settle()

    def ask(self, name: str | None) -> asyncio.Future[Model]:
        """The model that a body names, as soon as it is loaded: to be given back by ``release``, unless cancelled.

        name: None where the body names none. Raises ApiError for an unknown one, QueueFullError and
        EngineStoppedError. The future raises ApiError where the model cannot be loaded.
        """
        entry = self._find(name)
        if self._stopping and entry.state != "loaded":
            raise EngineStoppedError("the server is stopping")
        if (waiting := entry.num_waiting) >= entry.spec.max_queue:
            raise QueueFullError(f"{waiting} requests wait until {entry.spec.name!r} is loaded, and no more may")
        if not waiting:
            entry.waiters.clear()
            entry.asked = next(self._turns)
        future: asyncio.Future[Model] = self._loop.create_future()
        future.add_done_callback(lambda done: self._settle() if done.cancelled() else None)
        entry.waiters.append(future)
        self._settle()
        return future

    def release(self, model: Model) -> None:
        """A request gives its model back."""
        (entry,) = (entry for entry in self._entries if entry.model is model)
        entry.num_users -= 1
        entry.used = next(self._turns)
        self._settle()

    @property
    def loaded(self) -> list[Model]:
        """The models that are loaded."""
        return [entry.model for entry in self._entries if entry.model]

    @property
    def max_prompt_lens(self) -> dict[str | None, int | None]:
        """Tokens that a prompt may have, for each name and, where a body needs none, None. None: not known yet."""
        lengths: dict[str | None, int | None] = {name: entry.max_prompt_len for name, entry in self._by_name.items()}
        if len(self._served) == 1:
            lengths[None] = self._served[0].max_prompt_len
        return lengths

    def descriptions(self) -> list[dict[str, Any]]:
        """All models as ``/v1/models`` lists them."""
        return [entry.description(self.created) for entry in self._served]

    def description(self, name: str) -> dict[str, Any]:
        """One of them, by its name or an alias. Raises ApiError."""
        return self._find(name).description(self.created)

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
        """What ``/metrics`` answers."""
        for name, metrics in self._metrics.items():
            entries = [entry for entry in self._entries if entry.spec.name == name]
            waiting = sum(entry.num_waiting for entry in entries)
            metrics.show([entry.model.engine for entry in entries if entry.model], waiting)
        return self._families.text()

    def refuse(self) -> None:
        """The server stops: load nothing more. Requests that wait for a model fail, and builds are stopped."""
        self._stopping = True
        for entry in self._entries:
            entry.fail(EngineStoppedError("the server is stopping"))
            entry.stop_build()

    async def stop(self) -> None:
        """Close all models. What is being loaded is loaded first."""
        self.refuse()
        while self._tasks:
            await asyncio.wait(self._tasks)
        engines = [model.engine for model in self.loaded]
        await asyncio.gather(*(asyncio.to_thread(engine.stop, 0.0) for engine in engines))

    # ------------------------------------------------------------------------------------------------ turns

    def _settle(self) -> None:
        """Give models to requests, and room to models, as far as there is any."""
        if not self._stopping:
            for entry in self._leaving():
                if entry.model and not entry.num_users:
                    engine, entry.model = entry.model.engine, None
                    self._begin_task(entry, "closing", self._close(entry, engine))
            for entry in self._awaited()[: max(0, self._num_free())]:
                self._begin_task(entry, "loading", self._load(entry))
        leaving = () if self._stopping else self._leaving()
        for entry in self._entries:
            if entry.state == "loaded" and entry not in leaving:
                entry.give(next(self._turns))
        served = self._served
        self._entries = [one for one in self._entries if one in served or one.state != "asleep" or one.num_waiting]

    def _awaited(self) -> list[ModelEntry]:
        """Sleeping models that requests wait for, in the order in which they were asked for."""
        awaited = [entry for entry in self._entries if entry.state == "asleep" and entry.num_waiting]
        return sorted(awaited, key=lambda entry: entry.asked)

    def _leaving(self) -> list[ModelEntry]:
        """Loaded models that take no further requests: those that go, and those whose room others wait for."""
        loaded = [entry for entry in self._entries if entry.state == "loaded"]
        loaded.sort(key=lambda entry: (entry.num_users > 0, entry.used))
        served = self._served
        gone = [entry for entry in loaded if entry not in served]
        coming = sum(entry.state == "closing" or (entry in gone and not entry.num_users) for entry in self._entries)
        wanted = len(self._awaited()) - self._num_free() - coming
        return gone + [entry for entry in loaded if entry in served][: max(0, wanted)]

    def _num_free(self) -> int:
        return self._max_loaded - sum(entry.state != "asleep" for entry in self._entries)

    @property
    def _served(self) -> list[ModelEntry]:
        """Models that bodies may name, in their order."""
        return [*dict.fromkeys(self._by_name.values())]

    # ------------------------------------------------------------------------------------------ loading and closing

    def _begin_task(
        self, entry: ModelEntry, state: Literal["loading", "closing"], work: Coroutine[Any, Any, None]
    ) -> None:
        entry.state = state
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _load(self, entry: ModelEntry) -> None:
        name, began = entry.spec.name, time.perf_counter()
        write("loading", {"model": name})

        def started(stop: Callable[[], None]) -> None:
            entry.stop_build = stop
            if self._stopping:
                stop()

        try:
            loaded = await asyncio.to_thread(entry.spec.load, started)
        except Exception as error:
            entry.state = "asleep"
            trace = None if isinstance(error, SpecError) else error
            log.error("model %s cannot be loaded: %s", name, error, exc_info=trace)
            message = f"model {name!r} cannot be loaded; the server's log says why"
            entry.fail(ApiError(503, message, "model", "model_not_loaded"))
        else:
            self._begin(entry, loaded)
            write("loaded", {"model": name, "seconds": round(time.perf_counter() - began, 3)})
        finally:
            entry.stop_build = lambda: None
        self._settle()

    def _begin(self, entry: ModelEntry, loaded: LoadedModel) -> None:
        """From now on the model is loaded. The requests that wait get it, whoever else waits for room."""
        engine = EngineThread(loaded.decoder, self._deliver, entry.spec.max_queue)
        entry.model = Model(entry.spec, loaded, engine, entry.metrics)
        entry.build_config = loaded.decoder.target.build_config
        entry.state, entry.used = "loaded", next(self._turns)
        engine.start()
        entry.give(next(self._turns))

    async def _close(self, entry: ModelEntry, engine: EngineThread) -> None:
        """Put a model to sleep that no request has."""
        await asyncio.to_thread(engine.stop, 0.0)
        del engine  # With it the decoder's memory.
        await asyncio.to_thread(return_freed)
        entry.state = "asleep"
        write("asleep", {"model": entry.spec.name})
        self._settle()

    def _deliver(self, updates: Sequence[RequestUpdate]) -> None:
        """Hand out updates in the event loop. Called in engine threads."""
        self._loop.call_soon_threadsafe(_deliver_all, updates)

    # ----------------------------------------------------------------------------------------------- names

    def _find(self, name: str | None) -> ModelEntry:
        """The model of a name, or the only one where a body names none. Raises ApiError."""
        if not name and len(self._served) == 1:
            return self._served[0]
        if name in self._by_name:
            return self._by_name[name]
        names = ", ".join(repr(entry.spec.name) for entry in self._served)
        if not name:
            raise ApiError(400, f"model: missing; served here: {names}", "model")
        raise ApiError(404, f"model {show(name)} is not served here; served here: {names}", "model", "model_not_found")

    def _metrics_of(self, name: str) -> Metrics:
        if name not in self._metrics:
            self._metrics[name] = Metrics(self._families, name)
        return self._metrics[name]


def _deliver_all(updates: Sequence[RequestUpdate]) -> None:
    for one in updates:
        one.deliver()
