"""The server process: sockets, signals, and an orderly end."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType

import uvicorn
from typing_extensions import override

from specrun.serve.app import make_app
from specrun.serve.connection import ACCEPTED_AT_ONCE, Connection, ConnectionLimiter, connection_limit
from specrun.serve.keys import ApiKey
from specrun.serve.limits import KEEP_ALIVE_SECONDS, MAX_STORED_RESPONSES, WRITE_SECONDS
from specrun.serve.listening import BACKLOG, ListenOptions
from specrun.serve.model import LoadedModel, ModelSpec
from specrun.serve.models import Models
from specrun.serve.response_store import ResponseStore
from specrun.serve.service import Service


async def serve(
    specs: Sequence[ModelSpec],
    listener: socket.socket,
    *,
    listening: ListenOptions,
    keys: Sequence[ApiKey],
    allowed_hosts: Collection[str] | None,
    drain_seconds: float,
    metrics_prefix: str,
    log_prompts: bool,
    loaded: Mapping[str, LoadedModel] | None = None,
    max_loaded: int = 1,
    write_seconds: float = WRITE_SECONDS,
    max_connections_by_address: int | None = None,
    max_stored_responses: int = MAX_STORED_RESPONSES,
) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP; then answer what was taken, for at most ``drain_seconds``, and return.

    listener: a socket of ``listening``. allowed_hosts: see ``specrun.serve.hosts``; None allows all. loaded: models
    that are loaded already, by name. max_loaded: see ``specrun.serve.models``. write_seconds,
    max_connections_by_address: see ``specrun.serve.connection``. max_stored_responses: see
    ``specrun.serve.response_store``; 0 stores none.
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
    )
    limiter = ConnectionLimiter(connection_limit(), max_connections_by_address)
    config = uvicorn.Config(
        make_app(service),
        # Made of h11: httptools keeps a header of any size in memory.
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
    server = _Server(config, models)
    try:
        await server.serve([listener])
    finally:
        await service.bodies.close()
        await models.stop()
        if listening.uds:
            listening.uds.unlink(missing_ok=True)


class _Server(uvicorn.Server):
    """uvicorn's server, but a signal that ended it in good order is not raised again."""

    def __init__(self, config: uvicorn.Config, models: Models) -> None:
        super().__init__(config)
        self._models = models

    @override
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let answers end. Those whose models would have to be loaded first are refused."""
        self._models.refuse()
        await super().shutdown(sockets)

    @override
    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to serve. asyncio accepts as many connections at once as may wait; more may wait."""
        await super().startup(sockets)
        for one in sockets or ():
            one.listen(BACKLOG)

    @contextmanager
    @override
    def capture_signals(self) -> Iterator[None]:
        """Obey a terminal that closes as well, unless the server was started with nohup."""
        with super().capture_signals():
            before = signal.getsignal(signal.SIGHUP)
            if before is signal.SIG_IGN or threading.current_thread() is not threading.main_thread():
                yield
                return
            signal.signal(signal.SIGHUP, self.handle_exit)
            try:
                yield
            finally:
                signal.signal(signal.SIGHUP, before)

    @override
    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains the server, the second ends it."""
        self.force_exit = self.should_exit
        self.should_exit = True
