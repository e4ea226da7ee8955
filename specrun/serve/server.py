"""The server process: sockets, signals, and an orderly end."""

from __future__ import annotations

import asyncio
import signal
import socket
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FrameType

import uvicorn
from typing_extensions import override

from specrun.decoder import SpeculativeDecoder
from specrun.sampling.sampler import SamplingParams
from specrun.serve.app import make_app
from specrun.serve.connection import ACCEPTED_AT_ONCE, Connection, ConnectionLimiter, connection_limit
from specrun.serve.engine import EngineThread, RequestUpdate
from specrun.serve.keys import ApiKey
from specrun.serve.limits import KEEP_ALIVE_SECONDS, MAX_STORED_RESPONSES, WRITE_SECONDS
from specrun.serve.listening import BACKLOG, ListenOptions
from specrun.serve.metrics import Metrics
from specrun.serve.response_store import ResponseStore
from specrun.serve.service import Service


async def serve(
    decoder: SpeculativeDecoder,
    listener: socket.socket,
    *,
    listening: ListenOptions,
    model: str,
    keys: Sequence[ApiKey],
    allowed_hosts: Collection[str] | None,
    max_queue: int,
    timeout: float | None,
    drain_seconds: float,
    metrics_prefix: str,
    log_prompts: bool,
    defaults: SamplingParams,
    write_seconds: float = WRITE_SECONDS,
    max_connections_by_address: int | None = None,
    max_stored_responses: int = MAX_STORED_RESPONSES,
) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP; then answer what was taken, for at most ``drain_seconds``, and return.

    listener: a socket of ``listening``. allowed_hosts: see ``specrun.serve.hosts``; None allows all. write_seconds,
    max_connections_by_address: see ``specrun.serve.connection``. max_stored_responses: see
    ``specrun.serve.response_store``; 0 stores none.
    The decoder is closed at the end.
    """
    loop = asyncio.get_running_loop()

    def deliver_all(updates: Sequence[RequestUpdate]) -> None:
        for one in updates:
            one.deliver()

    def deliver(updates: Sequence[RequestUpdate]) -> None:
        loop.call_soon_threadsafe(deliver_all, updates)

    engine = EngineThread(decoder, deliver, max_queue)
    service = Service(
        decoder,
        engine,
        Metrics(metrics_prefix, model),
        model,
        keys=keys,
        allowed_hosts=allowed_hosts,
        listening=listening,
        timeout=timeout,
        log_prompts=log_prompts,
        defaults=defaults,
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
    server = _Server(config)
    engine.start()
    try:
        await server.serve([listener])
    finally:
        await service.bodies.close()
        await asyncio.to_thread(engine.stop, 0.0)
        if listening.uds:
            listening.uds.unlink(missing_ok=True)


class _Server(uvicorn.Server):
    """uvicorn's server, but a signal that ended it in good order is not raised again."""

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
