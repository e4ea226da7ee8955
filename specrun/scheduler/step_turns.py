"""Threads share one decoder: one of them works at a time, and the others wait for the end of its turn."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from specrun.errors import RequestError

_PATIENCE = 1.0
"""Seconds after which a waiting thread looks again: a second Ctrl-C may swallow the end of a turn."""


class _Turn:
    """One thread's turn."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()


class Turns:
    """Gives one thread at a time its turn.

    Threads wait for the end of a turn and not for a lock: the thread that has just released a lock mostly gets it
    again, and the others would not see what it has done for them.
    """

    def __init__(self) -> None:
        self.ended = 0
        """Number of turns that have ended."""
        self._process = os.getpid()
        self._turn: _Turn | None = None
        self._lock = threading.RLock()  # Garbage collection may close a stream, and come here, while it is held.
        self._end = threading.Condition(self._lock)

    @property
    def in_child(self) -> bool:
        """Whether this process was forked from the decoder's: threads that had a turn or a lock do not exist here."""
        return os.getpid() != self._process

    def require_own_process(self) -> None:
        """Raise RequestError in a process that was forked from the decoder's."""
        if self.in_child:
            raise RequestError(
                f"this decoder was opened in process {self._process}, and the engines' threads do not exist in process "
                f"{os.getpid()}, which was forked from it; open a decoder in this process"
            )

    def take(self, work: Callable[[], None], seen: int | None) -> None:
        """Do ``work`` in a turn of this thread, or wait for the end of another thread's turn.

        It returns when more than ``seen`` turns have ended. With ``seen`` None it never waits: the work is left undone
        while any thread has its turn. Raises RequestError in a child process, and where this thread would wait for
        itself.
        """
        self.require_own_process()
        turn = _Turn()
        try:
            with self._lock:
                # The other thread ends its turn without the lock, at any moment.
                while (other := self._turn) and seen in (None, self.ended):
                    if seen is None:
                        return
                    if other.thread == turn.thread:
                        raise RequestError("this thread is in a step of this decoder and cannot wait for its end")
                    self._end.wait(_PATIENCE)
                if seen not in (None, self.ended):
                    return
                self._turn = turn
            work()
        finally:
            # Python runs signal handlers at calls. There is none before the turn has ended, so that it ends always.
            if self._turn is turn:
                self._turn = None
                self.ended += 1
                with self._lock:
                    self._end.notify_all()
