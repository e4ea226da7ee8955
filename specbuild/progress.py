"""Progress for people, on standard error: a bar per stage on a terminal, a line per stage elsewhere."""

from __future__ import annotations

import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

Advance = Callable[[float], None]


class Stages:
    """The stages of one command, each shown while it runs."""

    def __init__(self, console: Console | None = None, names: Mapping[Path, str] | None = None) -> None:
        """names: what is shown in place of paths that the user has not chosen."""
        self.console = console or Console(stderr=True)
        self.started = time.monotonic()
        self._names = names or {}

    def _shown(self, text: str) -> str:
        for path, name in self._names.items():
            text = text.replace(str(path), name)
        return text

    @contextmanager
    def stage(self, name: str, total: float | None = None) -> Iterator[Advance]:
        """Show ``name`` while the block runs; it gets a function to advance the bar by (a share of ``total``)."""
        began, name = time.monotonic(), self._shown(name)
        if not self.console.is_terminal:
            yield lambda _amount: None
            self.console.print(f"{name}: {time.monotonic() - began:.1f} s", highlight=False, soft_wrap=True)
            return
        columns = (TextColumn("{task.description:<34}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=self.console) as progress:
            task = progress.add_task(name, total=total)
            yield lambda amount: progress.advance(task, amount)
            progress.update(task, total=total or 1, completed=total or 1)

    def say(self, text: str) -> None:
        """A line for people; never wrapped or coloured, so that it can be searched for."""
        self.console.print(self._shown(text), highlight=False, markup=False, soft_wrap=True)

    @property
    def seconds(self) -> float:
        """Seconds since the command began."""
        return time.monotonic() - self.started


@contextmanager
def deferred_signals(second_ends: bool) -> Iterator[threading.Event]:
    """Ctrl-C and SIGTERM as an event while the block runs; then they do what they do otherwise.

    second_ends: a second one does not wait.
    """
    came, received = threading.Event(), list[int]()
    if threading.current_thread() is not threading.main_thread():
        yield came
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    # Not those that are ignored, as in the background of a shell.
    before = {number: handler for number, handler in handlers.items() if callable(handler)}

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    def note(number: int, _frame: object) -> None:
        received.append(number)
        came.set()
        if second_ends:
            restore()

    for number in before:
        signal.signal(number, note)
    try:
        yield came
    finally:
        restore()
        if received and not isinstance(sys.exception(), Exception):
            signal.raise_signal(received[0])


def peak_memory() -> int:
    """Largest resident memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
