"""Starts the processes of an engine's ranks, and notices when one of them is lost."""

from __future__ import annotations

import hmac
import importlib.util
import os
import re
import secrets
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn

from specrun.backends.cpu_ranks.messages import ADDRESS, BEAT_SECONDS, TOKEN, Link, Newcomer, listen
from specrun.errors import BackendError, EngineLostError

_TO_START = 120.0
"""Seconds until all ranks must have connected."""
_SILENCE = 5 * BEAT_SECONDS
"""A rank that says nothing for so long while it should compute is lost."""
_MOST_STRANGERS = 256
"""Number of connections that have not said who they are. A rank says so at once."""
_ENDED = "a rank has ended"
"""Message that does not name the rank: once one ends, ``mpiexec`` ends the others."""
_TO_END = 2.0
"""Seconds in which ``mpiexec`` ends the ranks and removes its files, also on other machines."""
_LAUNCHERS_OWN = ("[mpiexec@", "[proxy:", "=", "This typically", "Please see")
"""Prefixes of lines that MPICH's launcher writes about itself."""
_LAUNCHERS_CAUSE = re.compile(r"\[mpiexec@.*?\): (.*)")
"""Pattern of a launcher's line with a cause; the first is the deepest. It is the only message if MPICH lost ssh's."""
_CAUSES = ("Fatal Python error: ", "YOUR APPLICATION TERMINATED WITH THE EXIT STRING: ")
"""Prefixes of lines that say why a rank has ended: its own, where a signal does not kill it at once, and MPICH's."""
_SENT = ("Killed", "Terminated", "Hangup", "Interrupt")
"""MPICH's names of signals that another process has sent. A rank may have written why before these, not others."""
_SHARED_MEMORY, _SHARED_BYTES = "/dev/shm", 2 << 20
"""File system of MPICH's shared memory, and bytes that suffice for each rank: it takes 1.1 MB."""
_HOW = "pip install mpi4py mpich"


class RankGroup:
    """The ranks' processes, and the links to them. Once one is lost all are ended, and every call raises."""

    def __init__(self, directory: Path, ranks: int, hosts: Sequence[str] = ()) -> None:
        """hosts: the ranks' machines, this one first; (): all are on this one.

        Raises BackendError where they do not start.
        """
        self._directory = directory
        self._hosts = hosts
        self._error: str | None = None
        self.links: list[Link] = []
        self.here = num_here(ranks, hosts)
        """Number of ranks on this machine; these are the first ones."""
        self._processes: dict[int, int] = {}
        """Process IDs of the ranks on this machine, by rank."""
        command = [_mpiexec(), *_placed(hosts), "-n", str(ranks)]
        _require_shared_memory(directory, self.here)
        self._selector = selectors.DefaultSelector()
        command += [sys.executable, "-P", "-X", "faulthandler", "-m", "specrun.backends.cpu_ranks.process"]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (It is open as long as they run.)
        # Only this user may enter the folder, and it is not needed once all ranks are connected.
        with tempfile.TemporaryDirectory(prefix="specrun-") as folder:
            try:
                listener, address = listen(folder, hosts[0] if hosts else None)
            except OSError as error:
                first = f"rank_hosts: {hosts[0]}, the first one, is not this machine" if hosts else str(directory)
                raise BackendError(f"{first}: {error}") from None
            token = secrets.token_hex()
            with listener:
                self._launcher = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=self._log,
                    stderr=self._log,
                    env={**os.environ, ADDRESS: address, TOKEN: token},
                    start_new_session=True,
                )
                try:
                    self._accept(listener, ranks, token)
                except BaseException:
                    self._end()
                    raise

    def tell(self, message: dict[str, Any], data: bytes = b"", to: Iterable[int] | None = None) -> None:
        """Have ranks do something, all or those in ``to``, and wait until they have.

        Raises EngineLostError where one is lost, or could not do it.
        """
        if self._error:
            raise EngineLostError(self._error)
        told = range(len(self.links)) if to is None else to
        for rank in told:
            try:
                self.links[rank].send(message, data)
            except OSError:
                self._lose(_ENDED)
        self._wait(set(told))

    def _wait(self, waiting: set[int]) -> None:
        """Until ranks have answered."""
        heard = [time.monotonic()] * len(self.links)
        while waiting:
            for key, _ in self._selector.select(BEAT_SECONDS):
                rank = key.data
                try:
                    answer, _ = self.links[rank].receive()
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

    def _accept(self, listener: socket.socket, ranks: int, token: str) -> None:
        """Wait for the ranks' connections. All that come are heard side by side, so strangers hold nothing up."""
        until, links = time.monotonic() + _TO_START, dict[int, Link]()
        strangers: dict[Newcomer, float] = {}
        """Deadline for each to send the token, by ``time.monotonic``."""
        listener.setblocking(False)
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            try:
                while len(links) < ranks:
                    if self._launcher.poll() is not None or time.monotonic() > until:
                        raise self._not_started(ranks)
                    for key, _ in selector.select(0.5):
                        if key.fileobj is listener:
                            _welcome(listener, selector, strangers)
                        else:
                            self._hear(key.data, token, links, selector, strangers)
                    _dismiss(selector, strangers)
            finally:
                for stranger in strangers:
                    stranger.socket.close()
        self.links = [links[rank] for rank in range(ranks)]

    def _hear(
        self,
        newcomer: Newcomer,
        token: str,
        links: dict[int, Link],
        selector: selectors.BaseSelector,
        strangers: dict[Newcomer, float],
    ) -> None:
        """Take a newcomer that says the token for a rank, and close the connection of one that says something else."""
        if newcomer not in strangers:
            return
        try:
            if (hello := newcomer.hello()) is None:
                return
        except (ValueError, RecursionError, EOFError, OSError):
            hello = {}
        del strangers[newcomer]
        selector.unregister(newcomer.socket)
        if not hmac.compare_digest(str(hello.get("token")).encode(errors="replace"), token.encode()):
            newcomer.socket.close()
            return
        rank = hello["rank"]
        links[rank] = newcomer.link()
        if rank < self.here:
            self._processes[rank] = hello["process"]
        self._selector.register(links[rank].socket, selectors.EVENT_READ, rank)

    def _not_started(self, ranks: int) -> BackendError:
        advice = f"; does 'ssh {self._hosts[-1]}' need no password?" if self._hosts else ""
        return BackendError(f"{self._directory}: its {ranks} ranks did not start{self._said()}{advice}")

    def _lose(self, what: str) -> NoReturn:
        """End all, because one is lost. Raises EngineLostError."""
        self._end()
        # Of another loss the log knows only that the ranks were ended here.
        said = self._said() if what == _ENDED else ""
        self._error = f"{self._directory}: {what}{said}; all its ranks were ended: open the engine again"
        raise EngineLostError(self._error)

    def _end(self) -> None:
        for link in self.links:
            link.close()
        self._launcher.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._launcher.wait(_TO_END)
        with suppress(OSError):
            os.killpg(self._launcher.pid, signal.SIGKILL)
        for process in self._processes.values():
            with suppress(OSError):
                os.kill(process, signal.SIGKILL)
        self._processes = {}
        self._selector.close()
        self._launcher.wait()

    def _said(self) -> str:
        self._log.seek(0)
        said = last_words(self._log.read().decode(errors="replace"))
        return f" ({said[:300]})" if said else ""


def last_words(log: str) -> str:
    """Why a rank has ended, or the last line that one has written, by what all ranks and the launcher wrote."""
    lines = [line.strip() for line in log.splitlines()]
    failures = [match[1] for line in lines if (match := _LAUNCHERS_CAUSE.match(line))]
    lines = [line for line in lines if line and not line.startswith(_LAUNCHERS_OWN)] or failures[:1]
    # Ranks that end at the same time write into each other's lines, and may break each of them.
    rank_errors, launchers = ([line.split(cause)[-1] for line in lines if cause in line] for cause in _CAUSES)
    faults = [line for line in launchers if not line.startswith(_SENT)]
    said = rank_errors or faults or [line for line in lines if not line.startswith(_CAUSES)] or launchers
    return said[-1] if said else ""


def _welcome(listener: socket.socket, selector: selectors.BaseSelector, strangers: dict[Newcomer, float]) -> None:
    """Begin to hear who has connected, some at a time: then a rank is heard before it is one of too many."""
    with suppress(OSError):  # Nobody else is there, or this process has no more files.
        for _ in range(_MOST_STRANGERS // 4):
            newcomer = Newcomer(listener.accept()[0])
            strangers[newcomer] = time.monotonic() + _SILENCE
            selector.register(newcomer.socket, selectors.EVENT_READ, newcomer)
            _dismiss(selector, strangers)


def _dismiss(selector: selectors.BaseSelector, strangers: dict[Newcomer, float]) -> None:
    """Close those who have said nothing for too long, and the first of too many."""
    for stranger, until in [*strangers.items()]:
        if time.monotonic() < until and len(strangers) <= _MOST_STRANGERS:
            return
        del strangers[stranger]
        selector.unregister(stranger.socket)
        stranger.socket.close()


def num_here(ranks: int, hosts: Sequence[str]) -> int:
    """How many of the ranks, the first ones, are on this machine, whose name stands first in ``hosts``."""
    return hosts.count(hosts[0]) if hosts else ranks


def _placed(hosts: Sequence[str]) -> list[str]:
    """What tells ``mpiexec`` of the machines."""
    return ["-hosts", ",".join(f"{host}:{len([*same])}" for host, same in groupby(hosts))] if hosts else []


def _require_shared_memory(directory: Path, ranks: int) -> None:
    """Raises BackendError where /dev/shm is too small: there MPICH's ranks end with a bus error."""
    with suppress(OSError):
        if (free := shutil.disk_usage(_SHARED_MEMORY).free) < (need := ranks * _SHARED_BYTES):
            raise BackendError(
                f"{directory}: {_SHARED_MEMORY} has {free >> 10} kB left, and {ranks} ranks need {need >> 10}: "
                "make it larger (docker run --shm-size)"
            )


def _mpiexec() -> str:
    """The MPI library's ``mpiexec``. Raises BackendError where it, or mpi4py, is missing."""
    if not hasattr(os, "memfd_create"):
        raise BackendError("engines of several ranks run on Linux only")
    if importlib.util.find_spec("mpi4py") is None:
        raise BackendError(f"engines of several ranks need mpi4py and an MPI library: {_HOW}")
    launcher = shutil.which("mpiexec", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if launcher is None:
        raise BackendError(f"engines of several ranks need an MPI library, whose mpiexec is not here: {_HOW}")
    return launcher
