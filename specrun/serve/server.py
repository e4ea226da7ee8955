"""The server process: sockets, signals, and an orderly end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType

import uvicorn
from typing_extensions import override

from specrun.errors import SpecError
from specrun.serve.app import make_app
from specrun.serve.connection import ACCEPTED_AT_ONCE, Connection, ConnectionLimiter, connection_limit
from specrun.serve.keys import ApiKey
from specrun.serve.limits import KEEP_ALIVE_SECONDS, MAX_STORED_RESPONSES, WRITE_SECONDS
from specrun.serve.listening import BACKLOG, ListenOptions
from specrun.serve.log import log, write
from specrun.serve.model import LoadedModel, ModelSpec
from specrun.serve.models import Models
from specrun.serve.response_store import ResponseStore
from specrun.serve.service import Service
from specrun.serve.tracing import Tracing

Reloaded = tuple[Sequence[ModelSpec], Sequence[ApiKey]]
"""The models and the API keys, read again."""


async def serve(
    specs: Sequence[ModelSpec],
    listener: socket.socket,
    *,
    listening: ListenOptions,
    keys: Sequence[ApiKey],
    reload: Callable[[], Reloaded] | None = None,
    allowed_hosts: Collection[str] | None,
    drain_seconds: float,
    metrics_prefix: str,
    log_prompts: bool,
    loaded: Mapping[str, LoadedModel] | None = None,
    max_loaded: int = 1,
    write_seconds: float = WRITE_SECONDS,
    max_connections_by_address: int | None = None,
    max_stored_responses: int = MAX_STORED_RESPONSES,
    tracing: Tracing | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT; then finish open requests, for at most ``drain_seconds``, and return.

    listener: a socket of ``listening``. reload: reads the models and the keys again, when SIGHUP comes. allowed_hosts:
    see ``specrun.serve.hosts``; None allows all. loaded: models that are loaded already, by name. max_loaded: see
    ``specrun.serve.models``. write_seconds, max_connections_by_address: see ``specrun.serve.connection``.
    max_stored_responses: see ``specrun.serve.response_store``; 0 stores none.
    All models are closed at the end.
    """
    models = Models(specs, metrics_prefix, max_loaded, loaded)
    service = Service(
        models,
        keys=keys,
        allowed_hosts=allowed_hosts,
        listening=listening,
        log_prompts=log_prompts,
        responses=ResponseStore(max_stored_responses),
        tracing=tracing,
    )
    limiter = ConnectionLimiter(connection_limit(), max_connections_by_address)
    config = uvicorn.Config(
        make_app(service),
        # h11, because httptools keeps a header of any size in memory.
        http=partial(Connection, limiter, write_seconds),  # type: ignore[arg-type]
        backlog=ACCEPTED_AT_ONCE,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        timeout_graceful_shutdown=int(drain_seconds),
        ssl_certfile=listening.ssl_certfile,
        ssl_keyfile=listening.ssl_keyfile,
    )
    server = _Server(config, service, reload)
    try:
        await server.serve([listener])
    finally:
        await service.bodies.close()
        await models.stop()
        if tracing:
            await tracing.stop()
        if listening.uds:
            listening.uds.unlink(missing_ok=True)


class _Server(uvicorn.Server):
    """uvicorn's server with reloads. A signal that has ended it in good order is not raised again."""

    def __init__(self, config: uvicorn.Config, service: Service, reload: Callable[[], Reloaded] | None) -> None:
        super().__init__(config)
        self._service, self._read_files = service, reload
        self._loop, self._reloading = asyncio.get_running_loop(), asyncio.Lock()
        self._ends_with_terminal = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN and _has_terminal()

    @override
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let answers end. Those whose models would have to be loaded first are refused."""
        self._service.models.refuse()
        await super().shutdown(sockets)

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to serve. asyncio accepts ``backlog`` connections at once; more may wait in the system's queue."""
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(BACKLOG)

    @contextmanager
    @override
    def capture_signals(self) -> Iterator[None]:
        """Handle SIGHUP as well."""
        with super().capture_signals():
            if threading.current_thread() is not threading.main_thread():
                yield
                return
            before = signal.signal(signal.SIGHUP, self._hang_up)
            try:
                yield
            finally:
                signal.signal(signal.SIGHUP, before)

    def _hang_up(self, sig: int, frame: FrameType | None) -> None:
        """End if the terminal has closed, unless started by nohup. Otherwise read the files again."""
        if self._ends_with_terminal and not _has_terminal():
            self.handle_exit(sig, frame)
        else:
            self._loop.call_soon_threadsafe(lambda: self._loop.create_task(self._reload()))

    async def _reload(self) -> None:
        """Read models and keys again. Where a file has mistakes, nothing changes."""
        if self._read_files is None:
            return
        async with self._reloading:
            try:
                specs, keys = await asyncio.to_thread(self._read_files)
            except (SpecError, OSError) as error:
                log.error("nothing was reloaded: %s", error)
                return
            self._service.models.replace(specs)
            self._service.keys = keys
            write("reloaded", {"models": [spec.name for spec in specs], "keys": len(keys)})

    @override
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains the server, the second ends it."""
        self.force_exit = self.should_exit
        self.should_exit = True


def _has_terminal() -> bool:
    """Whether the process belongs to a terminal that is open."""
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
