"""What the user of a chat types."""

from __future__ import annotations

import importlib
import io
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click


def is_terminal() -> bool:
    """Whether the input is a terminal, not a pipe."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def turns() -> Iterator[str]:
    """What was entered, stripped of space at its end, up to the input's end.

    In a terminal several lines that are pasted are one turn, Ctrl-C clears what is typed, and Ctrl-C on an empty line
    ends the input. Elsewhere each line is a turn.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")  # A turn that is not UTF-8 is refused alone.
    readline = _readline() if is_terminal() else None
    while True:
        interrupted = _Interrupted(readline)
        try:
            with interrupted.noted():
                text = input("> " if is_terminal() else "").rstrip()
        except KeyboardInterrupt:
            click.echo()
            if interrupted.was_typing:
                continue
            return
        except EOFError:
            click.echo(nl=is_terminal())
            return
        if text:
            yield text


def _readline() -> Any:
    """Gives ``input`` line editing and a history; None where there is none."""
    try:
        readline = importlib.import_module("readline")
    except ImportError:
        return None
    if os.environ.get("TERM") != "dumb":  # Which shows the bytes that switch it on.
        readline.parse_and_bind("set enable-bracketed-paste on")  # Off by default in releases before 8.1.
    return readline


class _Interrupted:
    """Notes at Ctrl-C whether something was typed: afterwards readline has forgotten it."""

    def __init__(self, readline: Any) -> None:
        self.was_typing = False
        self._readline = readline

    @contextmanager
    def noted(self) -> Iterator[None]:
        """While the block runs."""
        before = signal.getsignal(signal.SIGINT)

        def interrupt(*_: object) -> None:
            self.was_typing = bool(self._readline and self._readline.get_line_buffer())
            raise KeyboardInterrupt

        signal.signal(signal.SIGINT, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)
