"""What happens around a TensorRT build: its progress, and Ctrl-C, which its C++ code does not know."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensorrt import IProgressMonitor


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Ctrl-C and SIGTERM as an event while the block runs; then what they do otherwise.

    The builder calls Python from C++, prints an exception that it meets there and goes on building.
    """
    pressed = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield pressed
        return
    received: list[int] = []

    def receive(number: int, _frame: object) -> None:
        received.append(number)
        pressed.set()

    usual = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    handlers = {number: handler for number, handler in usual.items() if callable(handler)}
    for number in handlers:
        signal.signal(number, receive)
    try:
        yield pressed
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if received:
            handlers[signal.Signals(received[0])](received[0], None)


def progress_monitor(trt: Any, advance: Callable[[float], None], interrupted: threading.Event) -> IProgressMonitor:
    """Forward the builder's top-level phases to the progress bar, and stop the builder once ``interrupted``."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self.steps: dict[str, int] = {}

        def phase_start(self, phase_name: str, parent_phase: str | None, num_steps: int) -> None:
            if parent_phase is None:
                self.steps[phase_name] = max(1, num_steps)

        def step_complete(self, phase_name: str, step: int) -> bool:
            if phase_name in self.steps:
                advance(0.9 / self.steps[phase_name])
            return not interrupted.is_set()

        def phase_finish(self, phase_name: str) -> None:
            self.steps.pop(phase_name, None)

    return Monitor()
