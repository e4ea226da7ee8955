"""Builds that are stopped half-way."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from specbuild.cli import main

SPECBUILD = Path(sys.executable).parent / "specbuild"


ENDED = {
    signal.SIGINT: "specbuild: error: interrupted; nothing half-written was left behind",
    signal.SIGTERM: "specbuild: error: terminated; nothing half-written was left behind",
}


Moment = Callable[["Build"], bool]


class Build:
    """A running ``specbuild`` in a process group of its own, as a terminal starts one."""

    def __init__(self, log: Path, *args: object, program: tuple[str, ...] = (str(SPECBUILD),), **options: Any) -> None:
        self.log = log
        with log.open("wb") as stderr:
            command = [*program, *map(str, args)]
            self.process = subprocess.Popen(command, stderr=stderr, start_new_session=True, **options)

    def until(self, moment: Moment) -> None:
        """Wait for ``moment``; it must come before the build ends, and within a minute."""
        deadline = time.monotonic() + 60
        while not moment(self):
            assert self.process.poll() is None, self.stderr
            assert time.monotonic() < deadline, self.stderr
            time.sleep(0.001)

    def end(self, how: int | None = None) -> int:
        """Send the signal ``how`` to the whole group and wait for the exit status."""
        if how is not None:
            os.killpg(self.process.pid, how)
        return self.process.wait(60)

    @property
    def stderr(self) -> str:
        return self.log.read_text()


def interrupted(build: Build, moment: Moment, how: int = signal.SIGINT) -> None:
    build.until(moment)
    if how == signal.SIGINT:
        os.killpg(build.process.pid, how)
    else:
        os.kill(build.process.pid, how)  # Not the group: service managers and containers signal one process.
    was_interrupted(build, how)


def was_interrupted(build: Build, how: int) -> None:
    """It ends as one does that was sent the signal ``how``."""
    assert build.end() == 128 + how, build.stderr
    assert build.stderr.splitlines()[-1] == ENDED[signal.Signals(how)]
    assert build.stderr.count("error") == 1
    assert "Traceback" not in build.stderr


def with_small_files(*command: object) -> Result:
    """A command in this process, where for its time no file can grow beyond 100 kB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        return CliRunner().invoke(main, [str(part) for part in command], prog_name="specbuild")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
