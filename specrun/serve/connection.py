"""One client's connection."""

from __future__ import annotations

from asyncio import Transport

from uvicorn.protocols.http.h11_impl import H11Protocol, RequestResponseCycle

from specrun.serve import limits


class Connection(H11Protocol):
    """uvicorn's connection, closed when no whole request has come on it for some time.

    uvicorn itself waits without end for the rest of a request's headers.
    """

    _seen: RequestResponseCycle | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """Begin to watch."""
        super().connection_made(transport)
        self._watch = self.loop.call_later(limits.MAX_IDLE_SECONDS, self._close_if_idle)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop watching."""
        self._watch.cancel()
        super().connection_lost(exc)

    def _close_if_idle(self) -> None:
        is_idle = self.cycle is None or self.cycle.response_complete
        if is_idle and self.cycle is self._seen:
            self.transport.close()
            return
        self._seen = self.cycle
        self._watch = self.loop.call_later(limits.MAX_IDLE_SECONDS, self._close_if_idle)
