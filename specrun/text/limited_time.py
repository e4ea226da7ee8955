"""A limit on the time that untrusted Python code runs in this thread."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any


@contextmanager
def limited_time(seconds: float, is_limited: Callable[[CodeType], bool], message: str) -> Iterator[None]:
    """Raise TimeoutError with ``message`` in code of the block that ``is_limited`` names, ``seconds`` from now on.

    The clock is looked at before every line of that code: one line may take longer.
    """
    end = time.monotonic() + seconds

    def at_a_line(_frame: FrameType, _event: str, _arg: Any) -> Any:
        if time.monotonic() > end:
            raise TimeoutError(message)
        return at_a_line

    def at_a_call(frame: FrameType, _event: str, _arg: Any) -> Any:
        return at_a_line if is_limited(frame.f_code) else None

    before = sys.gettrace()
    sys.settrace(at_a_call)
    try:
        yield
    finally:
        sys.settrace(before)
