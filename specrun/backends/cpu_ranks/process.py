"""What a rank runs: started by ``mpiexec``, it does what the decoding process says until that closes its socket."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specrun import cpu_operators
from specrun.backends.cpu_ranks.backend import divide, versions
from specrun.backends.cpu_ranks.messages import ADDRESS, BEAT_SECONDS, TOKEN, Link, connect
from specrun.backends.cpu_ranks.shared_memory import Place, as_array, attach
from specrun.backends.ort import MAX_ROUND_LEN, OrtPass, open_session, values_of
from specrun.devices.processor import THREADS, num_threads
from specrun.engine_dir.config import EngineConfig
from specrun.errors import BackendError
from specrun.kv_cache.host import HostKVCache

ROW_OPERATIONS = {"clear", "clear_states", "swap", "save", "load", "save_state", "load_state"}
"""Methods of ``HostKVCache`` that a message can ask a rank on another machine to call."""

_MPI_MEMORY = "/dev/shm/mpich_shm_"
"""Prefix of the names of memory that MPICH's ranks on one machine share."""


class Rank:
    """One rank's engine. Its caches are the decoding process's memory, or its own where that is on another machine."""

    def __init__(self, rank: int, ranks: int, message: dict[str, Any], config: EngineConfig) -> None:
        """message: the first one, with where config.json is, and the decoding process's number. Raises SpecError."""
        _require_same(ranks, config, message)
        self._rank, self._process = rank, message["process"]
        self._config, here = config.of_rank(rank), message["here"]
        directory = Path(message["directory"]) / f"rank{rank}"
        if not directory.exists():
            raise BackendError(f"{directory} is not on {socket.gethostname()}: all machines need the whole directory")
        self._session = open_session(directory, self._config, "CPUExecutionProvider", {})
        self._new: list[Place] = []
        self._has_own = rank >= here
        """Whether its caches are its own."""
        if not self._has_own:
            graph, blocks, allocate = config.of_first_ranks(here).graph, 0, self._attached
            tensors = [len(config.graph.of_rank(other).own_tensors) for other in range(here)]
            self._tensors = slice(sum(tensors[:rank]), sum(tensors[: rank + 1]))
            states = len(graph.states)
            self._states = slice(rank * states, (rank + 1) * states)
        else:
            graph, blocks, allocate = self._config.graph, message["blocks"], np.zeros
            self._tensors = self._states = slice(None)
        storage, reads_hidden = graph.cache_element.storage, config.reads_hidden
        self._cache = HostKVCache(graph.own_tensors, storage, blocks, graph.row_states, allocate, reads_hidden)
        self._passes: dict[tuple[int, ...], OrtPass] = {}
        self._logits = np.empty(0, np.float32)

    def do(self, message: dict[str, Any], data: bytearray) -> None:
        """One message of the decoding process."""
        what = message["do"]
        if what == "run":
            self._run(message["pass"], np.frombuffer(data, np.int64))
        elif what in ROW_OPERATIONS:
            getattr(self._cache, what)(*message["arguments"])
        else:
            self._passes.clear()
            self._new = [Place(*fields) for fields in message["memory"]]
            if what == "resize":
                self._cache.resize(message["rows"], message["length"], message["used"] if self._has_own else 0)
            elif self._rank == 0:
                self._logits = self._view(self._new.pop(), np.float32)

    def _run(self, key: list[int], inputs: npt.NDArray[np.int64]) -> None:
        first, rows, query_len, num_logits = key
        step = self._passes.get((first, rows, query_len, num_logits))
        if step is None:
            step = self._bind(first, rows, query_len, num_logits)
            if first == 0 and query_len <= MAX_ROUND_LEN:
                self._passes[first, rows, query_len, num_logits] = step
        names = (step.input_ids, step.write_indices, step.logits_indices, step.state_indices, step.keep_indices)
        for array, given in zip(names, divide(inputs, rows, query_len, num_logits), strict=True):
            array[...] = given
        step.run()

    def _bind(self, first: int, rows: int, query_len: int, num_logits: int) -> OrtPass:
        caches = self._cache.part(first, rows)[self._tensors]
        states = self._cache.states(first, rows)[self._states]
        shape = (rows, num_logits, self._config.graph.vocab_size)
        size = int(np.prod(shape))
        # All ranks have the logits; those of the first one are read.
        logits = np.empty(size, np.float32) if self._rank else self._logits[:size]
        memory = values_of([*caches, *states])
        return OrtPass(self._session, self._config.graph, memory, query_len, logits.reshape(shape))

    def _attached(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """What the decoding process has allocated for the same array."""
        return as_array(attach(self._process, self._new.pop(0)), shape, dtype)

    def _view(self, area: Place, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        return as_array(attach(self._process, area), (area.nbytes // np.dtype(dtype).itemsize,), dtype)


class Exchange:
    """What collectives call: MPI's all-gather. A pass begins with the first number and has no gaps."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._world, self._next = MPI.COMM_WORLD, 0
        self._from_address = MPI.buffer.fromaddress
        self._machine = self._world.Split_type(MPI.COMM_TYPE_SHARED)
        self._machine.Barrier()
        _unlink_mpi_memory()
        self.rank, self.ranks = self._world.Get_rank(), self._world.Get_size()
        self.function = cpu_operators.Exchange(self._exchange)

    def on_this_machine(self) -> tuple[int, int]:
        """This rank's place among the ranks of its machine, and how many these are."""
        return self._machine.Get_rank(), self._machine.Get_size()

    def _exchange(self, number: int, part: int, everything: int, nbytes: int) -> int:
        try:
            if number not in (0, self._next):
                raise RuntimeError(f"collective {number} follows {self._next - 1}")
            self._next = number + 1
            given = self._from_address(part, nbytes)
            self._world.Allgather(given, self._from_address(everything, nbytes * self.ranks))
        except Exception as error:  # An exception cannot pass through C++.
            print(f"rank {self.rank}: {error}", file=sys.stderr)
            return 1
        return 0


class Beats:
    """Says at a steady pace that this process lives, while it computes."""

    def __init__(self, link: Link) -> None:
        self._link, self._lock = link, threading.Lock()
        self.busy = False
        threading.Thread(target=self._run, daemon=True).start()

    def answer(self, message: dict[str, Any]) -> None:
        """Send the answer, after which this process waits."""
        with self._lock:
            self.busy = False
            self._link.send(message)

    def _run(self) -> None:
        while True:
            time.sleep(BEAT_SECONDS)
            with self._lock:
                if self.busy:
                    try:
                        self._link.send({"beat": True})
                    except OSError:
                        os._exit(1)  # The other thread may wait in a collective for a rank that has ended.


def main() -> None:
    """The rank's loop."""
    exchange = Exchange()
    _share_cores(*exchange.on_this_machine())
    link = connect(os.environ[ADDRESS])
    link.send({"token": os.environ[TOKEN], "rank": exchange.rank, "process": os.getpid()})
    cpu_operators.set_exchange(exchange.function, exchange.ranks)
    beats, rank = Beats(link), None
    while True:
        try:
            message, data = link.receive()
        except (EOFError, OSError):
            break
        beats.busy = True
        try:
            if rank is None:
                config = EngineConfig.model_validate_json(bytes(data))
                rank = Rank(exchange.rank, exchange.ranks, message, config)
            else:
                rank.do(message, data)
            beats.answer({})
        except Exception as error:
            beats.answer({"error": " ".join(str(error).split())[:2000]})
    os._exit(0)  # Without MPI's own end, which waits for all ranks.


def _require_same(ranks: int, config: EngineConfig, message: dict[str, Any]) -> None:
    """Raise BackendError where this process cannot be a rank of the engine."""
    if ranks != config.build_config.tp_size:
        raise BackendError(
            f"{ranks} ranks were started for an engine of {config.build_config.tp_size}; are mpiexec and mpi4py of "
            "one MPI library?"
        )
    for name, version in versions().items():
        if version != (wanted := message["versions"][name]):
            raise BackendError(
                f"{socket.gethostname()} has {name} {version}, not {wanted}; install the same everywhere"
            )


def _unlink_mpi_memory() -> None:
    """Remove the names of MPICH's shared memory, which all ranks have mapped: MPICH does not where a rank is killed.

    What stays there fills /dev/shm, and then ranks end with a bus error.
    """
    with suppress(OSError), Path("/proc/self/maps").open() as maps:
        for name in {line.split()[5] for line in maps if f" {_MPI_MEMORY}" in line}:
            Path(name).unlink(missing_ok=True)


def _share_cores(index: int, ranks: int) -> None:
    """A rank has its share of its machine's cores, one behind the other, so that its memory is near them."""
    threads, cores = num_threads(), sorted(os.sched_getaffinity(0))
    os.environ[THREADS] = str(max(1, threads // ranks))
    if len(cores) >= ranks:
        os.sched_setaffinity(0, cores[index * len(cores) // ranks : (index + 1) * len(cores) // ranks])


if __name__ == "__main__":
    main()
