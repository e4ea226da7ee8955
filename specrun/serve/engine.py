"""The engine thread: the only one that runs steps and reads requests. Others get values of it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from specrun.decoder import SpeculativeDecoder
from specrun.errors import BackendError, EngineLostError, RequestError, SpecError
from specrun.request.request import Request
from specrun.request.updates import Update, UpdateCursor
from specrun.serve.log import log

MAX_FAILED_STEPS = 3
"""Number of failed steps, with no token between them, after which the engine counts as broken."""
_RESERVED_PART = 8
"""One part in so many of the queue is reserved for bodies whose answers fit into that part."""


class QueueFullError(SpecError):
    """The queue of waiting requests is full."""


class EngineStoppedError(SpecError):
    """The engine takes no more requests: the server is stopping, or the engine is broken."""


class Submission:
    """Requests that were submitted together."""

    def __init__(self, requests: Sequence[Request], receive: Callable[[int, Update], None]) -> None:
        """receive: called with the number of a request and each of its updates."""
        self.receive = receive
        self._requests = requests

    def cancel(self) -> None:
        """Cancel the requests that have not ended. Their rows are free within a round. Any thread may call this."""
        for request in self._requests:
            request.cancel()


class RequestUpdate(NamedTuple):
    """An update of one request of a submission."""

    submission: Submission
    number: int
    update: Update

    def deliver(self) -> None:
        """Call the submission's ``receive``."""
        self.submission.receive(self.number, self.update)


class EngineThread:
    """Runs a decoder's steps while there are requests.

    deliver: called in the engine thread after each step, with all new updates.
    """

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        deliver: Callable[[Sequence[RequestUpdate]], None],
        max_queue: int,
        hang_seconds: float = 120.0,
    ) -> None:
        """max_queue: requests that may wait for a row. hang_seconds: a step that takes longer counts as hanging."""
        self.decoder = decoder
        self.max_queue = max_queue
        self._scheduler = decoder.scheduler
        self._scheduler.always_chunk = True  # A long prompt must neither keep others out nor outlive its client.
        self._deliver = deliver
        self._hang_seconds = hang_seconds
        self._arrived: deque[tuple[UpdateCursor, Submission, int]] = deque()
        self._watched: list[tuple[UpdateCursor, Submission, int]] = []
        self._wake = threading.Condition()
        self._stopping = False
        self._step_began: float | None = None
        self._failed_steps = 0
        self._fatal_error: str | None = None
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Begin to run steps."""
        self._thread.start()

    @property
    def num_running(self) -> int:
        """Requests that have a row."""
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a row."""
        return self._scheduler.num_waiting

    @property
    def cache_usage(self) -> float:
        """Share of the rows' KV cache that requests have taken: 0 to 1."""
        room = self._scheduler.max_rows * self.decoder.target.build_config.max_seq_len
        return self._scheduler.num_cached / room

    def problem(self) -> str | None:
        """Why the engine does not work; None where it does."""
        began = self._step_began
        if self._fatal_error:
            return self._fatal_error
        if began is not None and time.perf_counter() - began > self._hang_seconds:
            return f"a step has been running for {time.perf_counter() - began:.0f} s"
        if self._failed_steps >= MAX_FAILED_STEPS:
            return f"{self._failed_steps} steps failed, and no token came since the first"
        return self._scheduler.round.problem()

    def require_room(self, count: int) -> None:
        """Raise QueueFullError or EngineStoppedError unless ``count`` requests could be submitted now.

        Raises RequestError where so many never can.
        """
        if self._stopping or self._fatal_error:
            raise EngineStoppedError(self._fatal_error or "the server is stopping")
        # Bodies that ask for many answers leave some room to the others.
        reserved = self.max_queue // _RESERVED_PART
        limit = self.max_queue if count <= reserved else self.max_queue - reserved
        if count > limit:
            raise RequestError(f"n: {count} answers, expected at most {limit} to one body; ask for fewer", "n")
        if (waiting := self._scheduler.num_waiting) + count > limit:
            raise QueueFullError(f"{waiting} requests wait, and at most {limit} may, with the {count} of this body")

    def submit(self, requests: Sequence[Request], receive: Callable[[int, Update], None]) -> Submission:
        """Queue ``requests``: all of them, or none. Any thread may call this.

        Raises QueueFullError, EngineStoppedError, and RequestError where one cannot be served.
        """
        submission = Submission(requests, receive)
        with self._wake:
            self.require_room(len(requests))
            self._scheduler.add(*requests)
            self._arrived.extend((UpdateCursor(request), submission, number) for number, request in enumerate(requests))
            self._wake.notify()
        return submission

    def stop(self, patience: float) -> None:
        """Take no more requests, finish the queued ones, and close the decoder.

        patience: seconds after which requests that have not ended are cancelled.
        """
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(patience)
        if self._thread.is_alive():
            for cursor, _, _ in [*self._watched, *self._arrived]:
                cursor.request.cancel()
            self._thread.join(self._hang_seconds)
        if not self._thread.is_alive():  # Closing would wait for a step that hangs.
            self.decoder.close()

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._step()
                self._take_arrived()  # After the step, which may have begun with them.
                self._deliver_updates()
        except BaseException as error:
            self._die(error)

    def _wait_for_work(self) -> bool:
        """Wait for requests. Returns False when the server stops and there are none."""
        with self._wake:
            while not (self._arrived or self._watched or self._scheduler.num_running):  # Rows are freed by a step.
                if self._stopping:
                    return False
                self._wake.wait()
        return True

    def _take_arrived(self) -> None:
        while self._arrived:
            self._watched.append(self._arrived.popleft())

    def _step(self) -> None:
        """Run one step. An error fails the requests of that step, and the others go on.

        Raises EngineLostError where no other step can work.
        """
        self._step_began = time.perf_counter()
        try:
            self._scheduler.step()
        except EngineLostError:
            raise
        except Exception as error:
            self._failed_steps += 1
            log.exception("a step failed: %s", error)
            if self._failed_steps >= MAX_FAILED_STEPS:
                for cursor, _, _ in self._watched:
                    cursor.request.fail(
                        error if isinstance(error, SpecError) else BackendError(f"broken off: {error!r}")
                    )
        finally:
            self._step_began = None

    def _deliver_updates(self) -> None:
        updated = [(entry, entry[0].update()) for entry in self._watched]
        self._watched = [entry for entry, update in updated if not (update and update.ended)]
        updates = [RequestUpdate(submission, number, update) for (_, submission, number), update in updated if update]
        if any(update.update.token_outputs for update in updates):
            self._failed_steps = 0
        if updates:
            self._deliver(updates)

    def _die(self, error: BaseException) -> None:
        """Fail all requests, because this thread ends."""
        log.critical("the engine thread ended: %r", error, exc_info=error)
        with self._wake:
            self._fatal_error = str(error) if isinstance(error, SpecError) else f"the engine thread ended: {error!r}"
            self._take_arrived()
        for cursor, _, _ in self._watched:
            cursor.request.fail(BackendError(self._fatal_error))
        self._deliver_updates()
