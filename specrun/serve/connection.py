"""Clients' connections: how many there may be, and how long one may wait for its client."""

from __future__ import annotations

import resource
from asyncio import Transport
from collections import OrderedDict
from pathlib import Path
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from specrun.serve import limits

ACCEPTED_AT_ONCE = 16
"""Number of connections that the event loop accepts before it looks at any of them."""
_SPARE_FILES = 64 + 4 * ACCEPTED_AT_ONCE
"""Number of files left to the engines, the log and connections that are being accepted or closed."""


def connection_limit() -> int:
    """Number of connections for which this process has files, at most ``limits.MAX_CONNECTIONS``."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files == resource.RLIM_INFINITY:
        return limits.MAX_CONNECTIONS
    return max(1, min(limits.MAX_CONNECTIONS, files - len([*Path("/dev/fd").iterdir()]) - _SPARE_FILES))


class Crowd:
    """The connections of one server. One too many ends the one that has waited longest for its client.

    So clients that only keep connections cannot keep others out, whose requests come at once. Those that have sent a
    request before, and will send another, come last.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._new: OrderedDict[Connection, None] = OrderedDict()
        """Connections that wait for their first request, and some that no longer do. The oldest comes first."""
        self._known: OrderedDict[Connection, None] = OrderedDict()
        """Connections that wait for another request, likewise."""

    def wait(self, connection: Connection) -> None:
        """From now on ``connection`` waits for a request."""
        self.leave(connection)
        (self._new if connection.cycle is None else self._known)[connection] = None

    def leave(self, connection: Connection) -> None:
        """``connection`` has ended."""
        self._new.pop(connection, None)
        self._known.pop(connection, None)

    def make_room(self, newest: Connection) -> None:
        """End a connection if there are too many: ``newest`` where no other waits for its client."""
        if len(newest.connections) <= self._limit:
            return
        self.leave(newest)
        for waiting in (self._new, self._known):
            while waiting:
                connection, _ = waiting.popitem(last=False)
                if connection.is_waiting:
                    connection.transport.abort()
                    self.wait(newest)
                    return
        newest.transport.abort()


class Connection(H11Protocol):
    """uvicorn's connection, closed when no whole request has come on it for some time.

    uvicorn itself waits without end for the rest of a request's headers.
    """

    _seen: RequestResponseCycle | None = None

    def __init__(self, crowd: Crowd, **given: Any) -> None:
        """given: uvicorn's arguments."""
        super().__init__(**given)
        self._crowd = crowd

    @property
    def is_waiting(self) -> bool:
        """Whether the client has yet to send a request or the rest of one, and has read the last answer."""
        needs_request = self.cycle is None or self.cycle.response_complete or self.cycle.more_body
        return needs_request and not self.transport.get_write_buffer_size()

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """Begin to watch."""
        super().connection_made(transport)
        self._watch = self.loop.call_later(limits.MAX_IDLE_SECONDS, self._close_if_idle)
        self._crowd.wait(self)
        self._crowd.make_room(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop watching."""
        self._watch.cancel()
        self._crowd.leave(self)
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        self._crowd.wait(self)
        super().on_response_complete()

    def _close_if_idle(self) -> None:
        is_idle = self.cycle is None or self.cycle.response_complete
        if is_idle and self.cycle is self._seen:
            self.transport.close()
            return
        self._seen = self.cycle
        self._watch = self.loop.call_later(limits.MAX_IDLE_SECONDS, self._close_if_idle)
