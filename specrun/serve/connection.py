"""Clients' connections: their maximum number, and how long one may wait for its client."""

from __future__ import annotations

import resource
from array import array
from asyncio import TimerHandle, Transport
from collections import Counter, OrderedDict
from contextlib import suppress
from fcntl import ioctl
from pathlib import Path
from termios import TIOCOUTQ
from typing import Any

import h11
from typing_extensions import override
from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from specrun.serve import limits
from specrun.serve.log import write

ACCEPTED_AT_ONCE = 16
"""Number of connections that the event loop accepts before it serves any of them."""
_SPARE_FILES = 64 + 4 * ACCEPTED_AT_ONCE + limits.SPARE_CONNECTIONS
"""Number of files left to the engines, the log, spare connections and those that are being accepted or closed."""
IS_SPARE = "is_spare"
"""Key in the state of a request that came on a spare connection."""


def connection_limit() -> int:
    """Number of connections for which this process has files, at most ``limits.MAX_CONNECTIONS``."""
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files == resource.RLIM_INFINITY:
        return limits.MAX_CONNECTIONS
    return max(1, min(limits.MAX_CONNECTIONS, files - len([*Path("/dev/fd").iterdir()]) - _SPARE_FILES))


class ConnectionLimiter:
    """Limits the connections of one server. One above the limit ends the one that has waited longest for its client.

    So clients that only keep connections, or do not read their answers, cannot keep out others, which send requests at
    once. Connections that have had a request are ended last. An address may have only a part of all connections. Where
    no connection can be ended, a few spare ones remain, which serve only ``/health``.
    """

    def __init__(self, limit: int, limit_by_address: int | None = None) -> None:
        """limit_by_address: None: three quarters of ``limit``."""
        self._limit = limit
        self._limit_by_address = limit_by_address or max(1, limit * 3 // 4)
        self._by_address: Counter[str] = Counter()
        self._new: OrderedDict[Connection, None] = OrderedDict()
        """Connections that wait for their first request, and some that no longer do. The oldest comes first."""
        self._unread: OrderedDict[Connection, None] = OrderedDict()
        """Connections whose clients have not read what was written. The one that has waited longest comes first."""
        self._known: OrderedDict[Connection, None] = OrderedDict()
        """Connections that wait for another request, and some that no longer do."""
        self._spare: OrderedDict[Connection, None] = OrderedDict()

    def enter(self, newest: Connection) -> None:
        """Count a connection. Above the limit, another one is ended, or it becomes a spare one."""
        address = newest.address
        self._by_address[address] += 1
        too_many_of_address = bool(address) and self._by_address[address] > self._limit_by_address
        too_many = len(newest.connections) - len(self._spare) > self._limit
        if (too_many_of_address or too_many) and not self._end_longest(address if too_many_of_address else None):
            if len(self._spare) >= limits.SPARE_CONNECTIONS:
                next(iter(self._spare)).transport.abort()
            self._spare[newest] = None
            newest.become_spare()
        else:
            self.wait(newest)

    def leave(self, connection: Connection) -> None:
        """Forget a connection that has ended."""
        self._forget(connection)
        self._spare.pop(connection, None)
        self._by_address[connection.address] -= 1
        if not self._by_address[connection.address]:
            del self._by_address[connection.address]

    def wait(self, connection: Connection) -> None:
        """Note that ``connection`` now waits for a request."""
        self._forget(connection)
        (self._new if connection.cycle is None else self._known)[connection] = None

    def wait_for_reader(self, connection: Connection) -> None:
        """Note that ``connection`` now waits for its client to read. Those that have waited longest may be ended."""
        self._forget(connection)
        self._unread[connection] = None
        unread = sum(connection.transport.get_write_buffer_size() for connection in self._unread)
        while unread > limits.MAX_UNREAD_BYTES and len(self._unread) > 1:
            longest, _ = self._unread.popitem(last=False)
            unread -= longest.transport.get_write_buffer_size()
            longest.end_unread("too much is unread")

    def go_on(self, connection: Connection) -> None:
        """Note that the client of ``connection`` has read."""
        self._unread.pop(connection, None)
        if connection.is_waiting:
            self.wait(connection)

    def _forget(self, connection: Connection) -> None:
        for group in (self._new, self._unread, self._known):
            group.pop(connection, None)

    def _end_longest(self, address: str | None) -> bool:
        """End the connection of ``address``, or of all, that has waited longest. Returns whether there is one."""
        for group in (self._new, self._unread, self._known):
            for connection in [waiting for waiting in group if address in (None, waiting.address)]:
                del group[connection]
                if connection.is_waiting:
                    connection.transport.abort()
                    return True
        return False


class _Parser(h11.Connection):
    """h11's parser of one connection. It refuses bodies in tiny chunks, which take as long as large ones."""

    _chunks = _bytes = 0

    @override
    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Raises RemoteProtocolError."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._chunks = self._bytes = 0
        elif isinstance(event, h11.Data):
            self._chunks, self._bytes = self._chunks + 1, self._bytes + len(event.data)
            if self._chunks > limits.FEW_CHUNKS and self._bytes < self._chunks * limits.LEAST_CHUNK_BYTES:
                raise h11.RemoteProtocolError("chunks are too small")
        return event


class Connection(H11Protocol):
    """uvicorn's connection, closed when its client neither sends a whole request nor reads for some time.

    uvicorn itself waits without end for the rest of a request's headers, and for a client that does not read.
    """

    _last_cycle: RequestResponseCycle | None = None
    _stall_timer: TimerHandle | None = None
    _has_events = False
    _paused_at = 0.0
    """Time on the loop's clock since which the client has read too slowly."""

    def __init__(self, limiter: ConnectionLimiter, write_seconds: float, **options: Any) -> None:
        """write_seconds: time in which a client must read some unread bytes. options: uvicorn's arguments."""
        super().__init__(**options)
        self.conn = _Parser(h11.SERVER, limits.MAX_HEADER_BYTES)
        self._limiter, self._write_seconds = limiter, write_seconds

    @property
    def address(self) -> str:
        """The client's address; '' where it is unknown."""
        return self.client[0] if self.client else ""

    @property
    def is_waiting(self) -> bool:
        """Whether the connection waits for its client to send a request, or to read.

        It counts as waiting too where further requests came before the answer, which no usual client sends.
        """
        needs_request = self.cycle is None or self.cycle.response_complete or self.cycle.more_body
        is_unread = self.flow.write_paused and self.loop.time() - self._paused_at > limits.UNREAD_SECONDS
        return needs_request or is_unread or len(self.conn.trailing_data[0]) > len(b"\r\n")

    @override
    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """Start the idle timer."""
        super().connection_made(transport)
        # Bytes that the system does not take at once are unread. With a limit of 0, asyncio's TLS is always full.
        transport.set_write_buffer_limits(high=1)
        transport.max_size = limits.READ_BYTES  # type: ignore[attr-defined]  # asyncio's own attribute.
        self._watch = self.loop.call_later(limits.MAX_IDLE_SECONDS, self._close_if_idle)
        self._limiter.enter(self)

    @override
    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers."""
        self._watch.cancel()
        self._end_stall()
        self._limiter.leave(self)
        super().connection_lost(exc)

    def become_spare(self) -> None:
        """Answer only open paths, and end soon."""
        self.app_state = {**self.app_state, IS_SPARE: True}
        self._watch.cancel()
        self._watch = self.loop.call_later(limits.SPARE_SECONDS, self.transport.abort)

    @override
    def handle_events(self) -> None:
        """Wait with the next request until the client has read its last answer."""
        self._has_events = self.flow.write_paused
        if self._has_events:
            self.flow.pause_reading()
        else:
            super().handle_events()

    @override
    def on_response_complete(self) -> None:
        """Wait for the next request."""
        if not self.flow.write_paused:
            self._limiter.wait(self)
        super().on_response_complete()

    @override
    def pause_writing(self) -> None:
        """Handle a client that reads more slowly than the server writes."""
        super().pause_writing()
        self._paused_at = self.loop.time()
        self._watch_reader()
        self._limiter.wait_for_reader(self)

    @override
    def resume_writing(self) -> None:
        """Handle a client that has read all bytes."""
        super().resume_writing()
        self._end_stall()
        self._limiter.go_on(self)
        if self._has_events and not self.transport.is_closing():
            self.flow.resume_reading()
            self.handle_events()

    def end_unread(self, reason: str) -> None:
        """End the connection of a client that does not read."""
        write("unread", {"address": self.address, "bytes": self.transport.get_write_buffer_size(), "reason": reason})
        self.transport.abort()

    def _num_unread(self) -> int:
        """Bytes that the client's system has not received."""
        sent = array("i", [0])
        with suppress(OSError):  # Not every system reports it.
            ioctl(self.transport.get_extra_info("socket"), TIOCOUTQ, sent)
        return self.transport.get_write_buffer_size() + sent[0]

    def _watch_reader(self) -> None:
        self._stall_timer = self.loop.call_later(self._write_seconds, self._end_if_stalled, self._num_unread())

    def _end_if_stalled(self, unread: int) -> None:
        if self._num_unread() < unread:
            self._watch_reader()
        else:
            self.end_unread(f"nothing was read in {self._write_seconds:g} s")

    def _end_stall(self) -> None:
        if self._stall_timer:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _close_if_idle(self) -> None:
        is_idle = self.cycle is None or self.cycle.response_complete
        if is_idle and self.cycle is self._last_cycle:
            self.transport.close()
            return
        self._last_cycle = self.cycle
        self._watch = self.loop.call_later(limits.MAX_IDLE_SECONDS, self._close_if_idle)
