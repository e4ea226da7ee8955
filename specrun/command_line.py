"""What the two commands share: hyphens for underscores, one-line errors, exit statuses, sizes in words."""

from __future__ import annotations

import errno
import gc
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import click
from typing_extensions import override

from specrun.errors import SpecError
from specrun.optional_packages import explain

CONTEXT = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda name: name.replace("-", "_"),
    "max_content_width": 120,
}
"""Options are spelled with underscores; hyphens mean the same."""

FolderPath = click.Path(path_type=Path)


class OneLineErrors(click.Group):
    """A command group that shows errors in one line.

    Exit 1 for the user's or files', 2 for usage, 130 for Ctrl-C, 143 for SIGTERM.
    """

    @override
    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command; standard streams that were closed by the caller are replaced first."""
        if _stand_in_for_closed_streams():
            name = kwargs.get("prog_name") or Path(sys.argv[0]).name
            print(f"{name}: error: standard output is closed; send it to a file or to /dev/null", file=sys.stderr)
            sys.exit(1)
        return super().main(*args, **kwargs)

    @override
    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; turn what it raises into one line and an exit status."""
        with stop_signals() as received, fewer_collections():
            cause: BaseException | None = None
            try:
                result = super().invoke(ctx)
                if signal.SIGTERM not in received:  # After Ctrl-C alone a command may end as it likes.
                    return result
            except click.exceptions.Exit:
                if signal.SIGTERM not in received:
                    raise
            except KeyboardInterrupt as error:
                received.append(signal.SIGINT)
                cause = error
            except Exception as error:
                # A C++ module that is interrupted while it is imported raises ImportError, with one reason or another.
                if not received:
                    if reason := explain_error(error, ctx.invoked_subcommand):
                        _fail(ctx, reason, error)
                    raise
                cause = error
            what = "terminated" if received[0] == signal.SIGTERM else "interrupted"
            return _fail(ctx, f"{what}; nothing half-written was left behind", cause, status=128 + received[0])


def explain_error(error: Exception, command: str | None) -> str | None:
    """What is shown of errors of users, files and machines in ``command``; None for all others."""
    if isinstance(error, SpecError):
        return str(error)
    if isinstance(error, OSError) and error.errno != errno.EPIPE:
        full = "; free some space and run it again" if error.errno == errno.ENOSPC else ""
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror or error}{full}"
    if isinstance(error, ImportError) and (reason := explain(error)):
        return f"{command} needs {reason}"
    return None


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """While the block runs, SIGTERM, which service managers and containers send, does what Ctrl-C does.

    Yields the numbers of the signals that came.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    hook, again = sys.unraisablehook, list[threading.Timer]()

    def stop_later(dropped: sys.UnraisableHookArgs) -> None:
        """Python drops what is raised in a finalizer, a signal's exception too, so the signal has to come again."""
        if not (received and isinstance(dropped.exc_value, KeyboardInterrupt)):
            hook(dropped)
            return
        signal.signal(received[0], stop)
        again.append(threading.Timer(0.01, signal.pthread_kill, [threading.get_ident(), received[0]]))
        again[-1].start()

    def stop(number: int, _frame: object) -> None:
        if number == signal.SIGTERM:
            # A second one must not break off what this one makes tidy. (Of SIG_IGN Python complains when one is under
            # way.)
            signal.signal(number, lambda *_: None)
        received.append(number)
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    if before[signal.SIGINT] is not signal.default_int_handler:
        del before[signal.SIGINT]  # Ignored, as in the background of a shell; or somebody else's.
    for number in before:
        signal.signal(number, stop)
    sys.unraisablehook = stop_later
    try:
        yield received
    finally:
        sys.unraisablehook = hook
        for timer in again:
            timer.cancel()
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def fewer_collections() -> Iterator[None]:
    """While the block runs, garbage is collected less often.

    PyTorch's import makes hundreds of thousands of objects that stay. Python would look through them again and again.
    """
    before = gc.get_threshold()
    gc.set_threshold(max(before[0], 10_000), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _stand_in_for_closed_streams() -> bool:
    """Open what the caller has closed on the null device; whether that was standard output.

    Otherwise the next file that is opened would take its number, and receive what libraries print.
    """
    missing = [number for number in (0, 1, 2) if not _is_open(number)]
    for number in missing:  # From 0: the lowest free number is taken.
        os.open(os.devnull, os.O_RDWR)
        if number == 0:
            sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
        else:
            stream = open(number, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
            setattr(sys, "stdout" if number == 1 else "stderr", stream)
    return 1 in missing


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _fail(ctx: click.Context, message: str, cause: BaseException | None, status: int = 1) -> NoReturn:
    if cause and ctx.params.get("debug"):
        traceback.print_exception(cause)
    show_error(ctx, message)
    sys.exit(status)


def show_error(ctx: click.Context, message: object) -> None:
    """One line on standard error, under the program's name."""
    click.echo(f"{ctx.find_root().info_name}: error: {' '.join(str(message).split())}", err=True)


def human_bytes(count: float) -> str:
    """1234567 -> '1.2 MB'."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
