"""Progress of a TensorRT build, and its end at Ctrl-C, which its C++ code does not handle."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tensorrt import IProgressMonitor


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
