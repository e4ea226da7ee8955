"""What the two commands share: hyphens for underscores, one-line errors, exit statuses."""

from __future__ import annotations

import errno
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

import click

from specrun.errors import SpecError

CONTEXT = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda name: name.replace("-", "_"),
    "max_content_width": 120,
}
"""Options are spelled with underscores; hyphens mean the same."""

FolderPath = click.Path(path_type=Path)


class OneLineErrors(click.Group):
    """A command group that shows errors in one line; exit 1 for the user's or files', 2 for usage, 130 for Ctrl-C."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; turn what it raises into one line and an exit status."""
        try:
            return super().invoke(ctx)
        except SpecError as error:
            _fail(ctx, str(error))
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise
            full = "; free some space and run it again" if error.errno == errno.ENOSPC else ""
            where = f"{error.filename}: " if error.filename else ""
            _fail(ctx, f"{where}{error.strerror or error}{full}")
        except KeyboardInterrupt:
            _fail(ctx, "interrupted; nothing half-written was left behind", status=130)


def _fail(ctx: click.Context, message: str, status: int = 1) -> NoReturn:
    if ctx.params.get("debug"):
        traceback.print_exc()
    show_error(ctx, message)
    sys.exit(status)


def show_error(ctx: click.Context, message: object) -> None:
    """One line on standard error, under the program's name."""
    click.echo(f"{ctx.find_root().info_name}: error: {' '.join(str(message).split())}", err=True)
