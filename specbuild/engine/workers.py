"""Run a function over several items in processes of their own, so that Ctrl-C stops all of them cleanly."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.synchronize import Event
from typing import Any, TypeVar

from specbuild.progress import Advance
from specrun.errors import BuildError
from specrun.optional_packages import held

Item = TypeVar("Item")
Result = TypeVar("Result")


def run_side_by_side(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    workers: int,
    advance: Advance,
    load: Callable[[], object] = lambda: None,
) -> list[Result]:
    """``function`` of every item, ``workers`` at a time; ``advance`` is called for each that is done.

    load: called first in every worker, to import what ``function`` needs; an interrupt in the middle of a C++ module's
    import would abort the worker with a traceback. The first exception cancels what has not begun and is raised.
    Raises BuildError when a worker is killed.
    """
    # Fresh processes: a fork would copy the compilers' threads in an undefined state.
    context = multiprocessing.get_context("spawn")
    with _away_from_working_directory():  # An Event starts a process too, which counts semaphores.
        stop = context.Event()
    with ProcessPoolExecutor(workers, context, _start_worker, (stop, load)) as pool:
        # Workers inherit both: Ctrl-C finds none of them half started.
        with held(signal.SIGINT), _away_from_working_directory():
            futures = [pool.submit(_in_worker, function, item) for item in items]
        try:
            for future in as_completed(futures):
                future.result()
                advance(1.0)
        except BrokenProcessPool as error:
            raise BuildError(
                f"--workers {workers}: a worker process was killed, perhaps for lack of memory; give fewer workers"
            ) from error
        except BaseException as error:
            stop.set()
            if isinstance(error, KeyboardInterrupt):
                for worker in multiprocessing.active_children():  # SIGTERM may have reached this process alone.
                    worker.terminate()
            pool.shutdown(cancel_futures=True)
            raise
        return [future.result() for future in futures]


@contextmanager
def _away_from_working_directory() -> Iterator[None]:
    """Interpreters that are started inside import nothing from the working directory, which may be a stranger's."""
    name = "PYTHONSAFEPATH"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


_stop: Event | None = None
"""Event of a worker process; set once the command was interrupted, so that waiting work is not begun."""


def _start_worker(stop: Event, load: Callable[[], object]) -> None:
    """A worker ignores Ctrl-C and SIGTERM, which may reach the whole process group, except while it works."""
    global _stop
    _stop = stop
    load()  # SIGINT is blocked still, and SIGTERM ends the worker without a word.
    _take_signals(_ignore)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _in_worker(function: Callable[[Item], Result], item: Item) -> Result:
    _take_signals(_interrupt)
    try:
        if _stop and _stop.is_set():
            raise KeyboardInterrupt
        return function(item)
    finally:
        _take_signals(_ignore)


def _ignore(*_: object) -> None:
    """Do nothing. With SIG_IGN in its place Python complains of signals that are on their way."""


def _interrupt(*_: object) -> None:
    _take_signals(_ignore)  # A second signal must not break off what the first one makes tidy.
    raise KeyboardInterrupt


def _take_signals(handler: Any) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)
