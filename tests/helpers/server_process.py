"""``specrun serve`` as a process."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile

import httpx


@dataclass(frozen=True)
class Server:
    """``specrun serve`` in a process of its own."""

    process: subprocess.Popen[bytes]
    url: str
    log: Path
    """What it wrote to standard error: a file, because a server waits when nobody reads its pipe."""


@contextmanager
def serving(engines: Path, *options: str, within: Sequence[str] = ()) -> Iterator[Server]:
    """``within`` is a command that runs it."""
    pair = ("--engine_dir", str(engines / "target"), "--draft_engine_dir", str(engines / "draft"))
    with serving_with(*pair, *options, within=within) as server:
        yield server


@contextmanager
def serving_with(*options: str, within: Sequence[str] = ()) -> Iterator[Server]:
    """The same, with all that it serves among the options."""
    command = [*within, sys.executable, "-m", "specrun", "serve", "--port", "0", *options]
    with NamedTemporaryFile() as log:
        process = subprocess.Popen(command, stderr=log)
        path = Path(log.name)
        try:
            while not (found := re.search(r"serving on (http://\S+);", path.read_text())):
                assert process.poll() is None, path.read_text()
                time.sleep(0.05)
            for _ in range(200):
                with suppress(httpx.TransportError):
                    assert httpx.get(f"{found[1]}/health").status_code == 200
                    break
                time.sleep(0.05)
            yield Server(process, found[1], path)
        finally:
            process.kill()
            process.wait()
