"""Starts the processes of an engine's ranks, and notices when one of them is lost."""

from __future__ import annotations

import importlib.util
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from specrun.backends.cpu_ranks.messages import ADDRESS, BEAT_SECONDS, receive, send
from specrun.devices.processor import THREADS, num_threads
from specrun.errors import BackendError, EngineLostError

_TO_START = 120.0
"""Seconds until all ranks must have connected."""
_SILENCE = 5 * BEAT_SECONDS
"""A rank that says nothing for so long while it should compute is lost."""
_ENDED = "a rank has ended"
"""Which one, nobody knows: where one ends, ``mpiexec`` ends the others."""
_HOW = "pip install mpi4py mpich"


class RankGroup:
    """The ranks' processes: rank r is at ``sockets[r]``. Once one is lost all are ended, and every call raises."""

    def __init__(self, directory: Path, ranks: int) -> None:
        """Raises BackendError where they do not start."""
        self._directory = directory
        self._error: str | None = None
        self.sockets: list[socket.socket] = []
        self._processes: dict[int, int] = {}
        self._selector = selectors.DefaultSelector()
        command = [_mpiexec(), "-n", str(ranks), sys.executable, "-P", "-m", "specrun.backends.cpu_ranks.process"]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (It is open as long as they run.)
        # Only this user may enter the folder, and nobody needs it once all ranks are connected.
        with tempfile.TemporaryDirectory(prefix="specrun-") as folder, _listener(f"{folder}/ranks", ranks) as listener:
            threads = max(1, num_threads() // ranks)
            self._launcher = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env={**os.environ, ADDRESS: f"{folder}/ranks", THREADS: str(threads)},
                start_new_session=True,
            )
            try:
                self._accept(listener, ranks)
            except BaseException:
                self._end()
                raise

    def send(self, message: dict[str, Any]) -> None:
        """Tell all ranks. Raises EngineLostError where one is lost."""
        if self._error:
            raise EngineLostError(self._error)
        for to in self.sockets:
            try:
                send(to, message)
            except OSError:
                self._lose(_ENDED)

    def wait(self) -> None:
        """Until all ranks have answered. Raises EngineLostError where one is lost, or could not do what it was told."""
        heard = [time.monotonic()] * len(self.sockets)
        waiting = set(range(len(self.sockets)))
        while waiting:
            for key, _ in self._selector.select(BEAT_SECONDS):
                rank = key.data
                try:
                    answer = receive(self.sockets[rank])
                except (EOFError, OSError):
                    self._lose(_ENDED)
                heard[rank] = time.monotonic()
                if "beat" not in answer:
                    waiting.discard(rank)
                if "error" in answer:  # The others may wait for it for ever.
                    self._lose(f"rank {rank} failed: {answer['error']}")
            now = time.monotonic()
            for rank in waiting:
                if now - heard[rank] > _SILENCE:
                    self._lose(f"rank {rank} has not answered for {_SILENCE:g} seconds")

    def problem(self) -> str | None:
        """Why the engine cannot go on; None: nothing is known to be wrong. Any thread may ask."""
        if self._launcher.poll() is not None:
            return self._error or f"{self._directory}: its ranks have ended"
        return self._error

    def close(self) -> None:
        """End all processes."""
        self._error = self._error or f"{self._directory}: the engine was closed"
        self._end()

    def _accept(self, listener: socket.socket, ranks: int) -> None:
        """Wait for the ranks' connections."""
        until, found = time.monotonic() + _TO_START, dict[int, socket.socket]()
        while len(found) < ranks:
            try:
                own, _ = listener.accept()
            except TimeoutError:
                if self._launcher.poll() is None and time.monotonic() < until:
                    continue
                raise BackendError(f"{self._directory}: its {ranks} ranks did not start{self._said()}") from None
            own.settimeout(None)
            hello = receive(own)
            found[hello["rank"]] = own
            self._processes[hello["rank"]] = hello["process"]
            self._selector.register(own, selectors.EVENT_READ, hello["rank"])
        self.sockets = [found[rank] for rank in range(ranks)]

    def _lose(self, what: str) -> NoReturn:
        """End all, because one is lost. Raises EngineLostError."""
        self._end()
        self._error = f"{self._directory}: {what}; all its ranks were ended: open the engine again{self._said()}"
        raise EngineLostError(self._error)

    def _end(self) -> None:
        for own in self.sockets:
            own.close()
        with suppress(OSError):
            os.killpg(self._launcher.pid, signal.SIGKILL)
        for process in self._processes.values():
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)
        self._processes = {}
        self._selector.close()
        self._launcher.wait()

    def _said(self) -> str:
        """The last line that the processes wrote."""
        self._log.seek(0)
        lines = [line.strip() for line in self._log.read().decode(errors="replace").splitlines() if line.strip()]
        return f" ({lines[-1][:300]})" if lines else ""


def _listener(address: str, ranks: int) -> socket.socket:
    own = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # Which keeps messages apart.
    own.bind(address)
    own.listen(ranks)
    own.settimeout(0.5)
    return own


def _mpiexec() -> str:
    """The MPI library's ``mpiexec``. Raises BackendError where it, or mpi4py, is missing."""
    if not hasattr(os, "memfd_create"):
        raise BackendError("engines of several ranks run on Linux only")
    if importlib.util.find_spec("mpi4py") is None:
        raise BackendError(f"engines of several ranks need mpi4py and an MPI library: {_HOW}")
    found = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        raise BackendError(f"engines of several ranks need an MPI library, whose mpiexec is not here: {_HOW}")
    return found
