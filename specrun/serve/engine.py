"""The engine thread: the only one that runs steps and reads requests. Everything it hands out is a value."""

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
"""Steps that fail, with no token between them, before the engine counts as broken."""


_SPARED = 8
"""One part in so many of the queue is left to bodies whose answers fit into that part."""


class QueueFullError(SpecError):
    """More requests wait than the server lets wait."""


class EngineStoppedError(SpecError):
    """The engine takes no more requests: the server is stopping, or the engine is broken."""


class Submission:
    """Requests that were submitted together."""

    def __init__(self, requests: Sequence[Request], receive: Callable[[int, Update], None]) -> None:
        """receive: is given each update, and the number of its request."""
        self.receive = receive
        self._requests = requests

    def cancel(self) -> None:
        """End what has not ended. Rows are free within a round. Any thread may call this."""
        for request in self._requests:
            request.cancel()


class RequestUpdate(NamedTuple):
    """An update of one request of a submission."""

    submission: Submission
    number: int
    update: Update

    def deliver(self) -> None:
        """Give it to the submission's receiver."""
        self.submission.receive(self.number, self.update)


class EngineThread:
    """Runs a decoder's steps while there are requests.

    deliver: called in the engine thread after each step, with all that is new.
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
        self._death: str | None = None
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
        if self._death:
            return self._death
        if began is not None and time.perf_counter() - began > self._hang_seconds:
            return f"a step has been running for {time.perf_counter() - began:.0f} s"
        if self._failed_steps >= MAX_FAILED_STEPS:
            return f"{self._failed_steps} steps failed, and no token came since the first"
        return self._scheduler.round.problem()

    def require_room(self, count: int) -> None:
        """Raise QueueFullError or EngineStoppedError unless ``count`` requests could be submitted now.

        Raises RequestError where so many never can.
        """
        if self._stopping or self._death:
            raise EngineStoppedError(self._death or "the server is stopping")
        # Bodies that ask for many answers leave some room to the others.
        most = self.max_queue if count <= (spared := self.max_queue // _SPARED) else self.max_queue - spared
        if count > most:
            raise RequestError(f"n: {count} answers, expected at most {most} to one body; ask for fewer", "n")
        if (waiting := self._scheduler.num_waiting) + count > most:
            raise QueueFullError(f"{waiting} requests wait, and at most {most} may, with the {count} of this body")

    def submit(self, requests: Sequence[Request], receive: Callable[[int, Update], None]) -> Submission:
        """Let ``requests`` wait for rows: all of them, or none. Any thread may call this.

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
        """Take no more requests, let those that were taken end, and close the decoder.

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
        if not self._thread.is_alive():  # One that hangs would let closing wait for ever.
            self.decoder.close()

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._step()
                self._take_arrived()  # Behind the step, which may have begun with them.
                self._hand_out()
        except BaseException as error:
            self._die(error)

    def _wait_for_work(self) -> bool:
        """Whether there are requests, as soon as there are; False when the server stops and there are none."""
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
        """One step. An error fails the requests that the step worked on, and the others go on.

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

    def _hand_out(self) -> None:
        updated = [(entry, entry[0].update()) for entry in self._watched]
        self._watched = [entry for entry, update in updated if not (update and update.ended)]
        updates = [RequestUpdate(submission, number, update) for (_, submission, number), update in updated if update]
        if any(one.update.token_outputs for one in updates):
            self._failed_steps = 0
        if updates:
            self._deliver(updates)

    def _die(self, error: BaseException) -> None:
        """Fail everything: without this thread nothing more will happen."""
        log.critical("the engine thread ended: %r", error, exc_info=error)
        with self._wake:
            self._death = str(error) if isinstance(error, SpecError) else f"the engine thread ended: {error!r}"
            self._take_arrived()
        for cursor, _, _ in self._watched:
            cursor.request.fail(BackendError(self._death))
        self._hand_out()
