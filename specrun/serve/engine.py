"""The engine thread: the only one that runs steps and reads requests. Everything it hands out is a value."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from specrun.decoder import SpeculativeDecoder
from specrun.errors import BackendError, SpecError
from specrun.request import FinishReason, Request, TokenOutput
from specrun.sampling import TokenLogprob
from specrun.serve.log import log
from specrun.stats import Stats

MAX_FAILED_STEPS = 3
"""Steps that fail, with no token between them, before the engine counts as broken."""


class QueueFullError(SpecError):
    """More requests wait than the server lets wait."""


class EngineStoppedError(SpecError):
    """The engine takes no more requests: the server is stopping, or the engine is broken."""


@dataclass(frozen=True)
class Ended:
    """How a request ended."""

    reason: FinishReason
    output_tokens: int
    stats: Stats
    error: SpecError | None


class Update(NamedTuple):
    """What one round did for one request."""

    request_index: int
    """Which of its job's requests."""
    token_outputs: Sequence[TokenOutput]
    drafted: int
    """Draft tokens of the round. Those accepted are in ``token_outputs``."""
    prompt_logprobs: Sequence[TokenLogprob]
    """Of the prompt's tokens from the second on, with the first update of a request that wants them."""
    ended: Ended | None
    """None: another update follows."""


class Job:
    """Requests that were submitted together. ``receive`` is called with their updates."""

    def __init__(self, requests: Sequence[Request], receive: Callable[[Update], None]) -> None:
        self.receive = receive
        self._requests = requests

    def cancel(self) -> None:
        """End what has not ended. Rows are free within a round. Any thread may call this."""
        for request in self._requests:
            request.cancel()


@dataclass
class _Watched:
    """What was handed out of a request so far."""

    job: Job
    index: int
    shown: int = 0
    drafted: int = 0


class EngineThread:
    """Runs a decoder's steps while there are requests.

    deliver: called in the engine thread after each step, with all updates of this step and their jobs.
    """

    def __init__(
        self,
        decoder: SpeculativeDecoder,
        deliver: Callable[[Sequence[tuple[Job, Update]]], None],
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
        self._arrived: deque[tuple[Request, _Watched]] = deque()
        self._watched: dict[Request, _Watched] = {}
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

    def problem(self) -> str | None:
        """Why the engine does not work; None where it does."""
        began = self._step_began
        if self._death:
            return self._death
        if began is not None and time.perf_counter() - began > self._hang_seconds:
            return f"a step has been running for {time.perf_counter() - began:.0f} s"
        if self._failed_steps >= MAX_FAILED_STEPS:
            return f"{self._failed_steps} steps failed, and no token came since the first"
        return None

    def submit(self, requests: Sequence[Request], receive: Callable[[Update], None]) -> Job:
        """Let ``requests`` wait for rows: all of them, or none. Any thread may call this.

        Raises QueueFullError, EngineStoppedError, and RequestError where one cannot be served.
        """
        job = Job(requests, receive)
        with self._wake:
            if self._stopping or self._death:
                raise EngineStoppedError(self._death or "the server is stopping")
            if self._scheduler.num_waiting + len(requests) > self.max_queue:
                raise QueueFullError(f"{self._scheduler.num_waiting} requests wait, and at most {self.max_queue} may")
            self._scheduler.add(*requests)
            self._arrived.extend((request, _Watched(job, index)) for index, request in enumerate(requests))
            self._wake.notify()
        return job

    def stop(self, patience: float) -> None:
        """Take no more requests, let those that were taken end, and close the decoder.

        patience: seconds after which requests that have not ended are cancelled.
        """
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._thread.join(patience)
        if self._thread.is_alive():
            for request in [*self._watched, *(request for request, _ in list(self._arrived))]:
                request.cancel()
            self._thread.join(self._hang_seconds)
        if not self._thread.is_alive():  # One that hangs would let closing wait for ever.
            self.decoder.close()

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._take_arrived()
                self._step()
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
            request, watched = self._arrived.popleft()
            self._watched[request] = watched

    def _step(self) -> None:
        """One step. An error fails the requests that the step worked on, and the others go on."""
        self._step_began = time.perf_counter()
        try:
            self._scheduler.step()
        except Exception as error:
            self._failed_steps += 1
            log.exception("a step failed: %s", error)
            if self._failed_steps >= MAX_FAILED_STEPS:
                for request in self._watched:
                    request.fail(error if isinstance(error, SpecError) else BackendError(f"broken off: {error!r}"))
        finally:
            self._step_began = None

    def _hand_out(self) -> None:
        updates: list[tuple[Job, Update]] = []
        for request, watched in list(self._watched.items()):
            if update := _news(request, watched):
                updates.append((watched.job, update))
                if update.ended:
                    del self._watched[request]
        if updates:
            if any(update.token_outputs for _, update in updates):
                self._failed_steps = 0
            self._deliver(updates)

    def _die(self, error: BaseException) -> None:
        """Fail everything: without this thread nothing more will happen."""
        log.critical("the engine thread ended: %r", error, exc_info=error)
        with self._wake:
            self._death = f"the engine thread ended: {error!r}"
            self._take_arrived()
        for request in self._watched:
            request.fail(BackendError(self._death))
        self._hand_out()


def _news(request: Request, watched: _Watched) -> Update | None:
    """What is new of ``request``; None where nothing is."""
    reason = request.finish_reason
    count, drafted = len(request.token_outputs), request.stats.drafted
    if reason is None and count == watched.shown:
        return None
    new = request.token_outputs[watched.shown :]
    scores = () if watched.shown else tuple(request.prompt_token_logprobs)
    ended = Ended(reason, count, replace(request.stats), request.error) if reason else None
    update = Update(watched.index, new, drafted - watched.drafted, scores, ended)
    watched.shown, watched.drafted = count, drafted
    return update
