"""The thread that sends responses. Only it calls response senders, which wait for the server's process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import triton_python_backend_utils as pb_utils

from specrun.errors import RequestError, SpecError
from specrun.request.updates import Update
from specrun.serve.engine import EngineStoppedError, QueueFullError, RequestUpdate, Submission
from specrun.serve.log import log
from specrun.triton.answer import UnsentAnswer
from specrun.triton.metrics import TritonMetrics
from specrun.triton.tensors import input_error

CANCEL_SECONDS = 0.1
"""Seconds between two checks whether clients have left."""


class Response:
    """The responses to one request."""

    def __init__(self, sender: Any, metrics: TritonMetrics) -> None:
        self.answer: UnsentAnswer | None = None
        self.submission: Submission | None = None
        """Set once the engine has the request."""
        self.is_closed = False
        self._sender, self._metrics = sender, metrics

    def receive(self, _number: int, update: Update) -> None:
        """Add the update of a round."""
        if self.answer:
            self.answer.add(update)

    def send_due(self, checks_client: bool) -> None:
        """Send a response if one is due. checks_client: cancel the request if its client has left."""
        if checks_client and self.submission and self._sender.is_cancelled():
            self.submission.cancel()
        if self.answer and self.answer.is_due:
            self._send_answer(self.answer)

    def give_up(self, error: Exception) -> None:
        """Cancel the request and end with an error, because a response could not be sent."""
        if self.submission:
            self.submission.cancel()
        self.fail(error)

    def _send_answer(self, answer: UnsentAnswer) -> None:
        ended = answer.ended
        if ended and ended.error:
            self.fail(ended.error)
        elif ended and ended.reason == "cancelled":
            self._send(error=pb_utils.TritonError("cancelled", pb_utils.TritonError.CANCELLED), is_last=True)
        else:
            tensors = [pb_utils.Tensor(name, array) for name, array in answer.take().items()]
            self._send(tensors, is_last=ended is not None)
        if ended and not answer.is_dropped:
            self._metrics.count_end(ended, answer.prompt_tokens)

    def fail(self, error: BaseException) -> None:
        """Send an error as the last response."""
        if not self.is_closed:
            message = input_error(error) if isinstance(error, SpecError) else f"broken off: {error!r}"
            self._send(error=pb_utils.TritonError(message, _code(error)), is_last=True)

    def _send(self, tensors: Sequence[Any] = (), error: Any = None, *, is_last: bool) -> None:
        self.is_closed = is_last
        flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if is_last else 0
        self._sender.send(pb_utils.InferenceResponse(output_tensors=list(tensors), error=error), flags=flags)


def _code(error: BaseException) -> Any:
    codes = pb_utils.TritonError
    if isinstance(error, QueueFullError | EngineStoppedError):
        return codes.UNAVAILABLE
    return codes.INVALID_ARG if isinstance(error, RequestError) else codes.INTERNAL


class ResponseThread:
    """Runs the work of other threads in order, and then sends due responses.

    One response has all tokens since the last one: with a slow server, responses grow and do not queue up.
    """

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._open: set[Response] = set()
        self._thread = threading.Thread(target=self._run, name="responses", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, patience: float) -> None:
        """Run the work so far, for at most ``patience`` seconds, and end the thread."""
        self._work.put(None)
        self._thread.join(patience)

    def begin(self, response: Response) -> None:
        """Send ``response`` until it is closed."""
        self.do(partial(self._open.add, response))

    def deliver(self, updates: Sequence[RequestUpdate]) -> None:
        """Deliver the updates of a step."""
        self.do(lambda: [update.deliver() for update in updates])

    def do(self, work: Callable[[], object]) -> None:
        """Queue ``work`` for this thread. Any thread may call this."""
        self._work.put(work)

    def _run(self) -> None:
        checked = time.monotonic()
        while self._do_all():
            if checks_clients := time.monotonic() - checked >= CANCEL_SECONDS:
                checked = time.monotonic()
            for response in list(self._open):
                if not _succeeds(partial(response.send_due, checks_clients), response.give_up):
                    response.is_closed = True
                if response.is_closed:
                    self._open.discard(response)

    def _do_all(self) -> bool:
        """Wait for work, with a timeout if responses are open, and run all of it. Returns False at the end."""
        try:
            work = self._work.get(timeout=CANCEL_SECONDS if self._open else None)
            while work:
                _succeeds(work)
                work = self._work.get_nowait()
            return False
        except Empty:
            return True


def _succeeds(work: Callable[[], object], otherwise: Callable[[Exception], object] | None = None) -> bool:
    """Run ``work``. An error is logged and passed to ``otherwise``; it must not end the thread."""
    try:
        work()
    except Exception as error:
        log.exception("a response failed: %s", error)
        if otherwise:
            _succeeds(partial(otherwise, error))
        return False
    return True
