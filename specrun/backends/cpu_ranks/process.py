"""What a rank runs: started by ``mpiexec``, it does what the decoding process says until that closes its socket."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specrun import cpu_operators
from specrun.backends.cpu_ranks.backend import cache_of_all, divide
from specrun.backends.cpu_ranks.messages import ADDRESS, BEAT_SECONDS, receive, send
from specrun.backends.cpu_ranks.shared_memory import Place, as_array, attach
from specrun.backends.ort import MAX_ROUND_LEN, OrtPass, open_session
from specrun.engine_dir.config import EngineConfig
from specrun.errors import BackendError


class Rank:
    """One rank's engine and its views of the caches."""

    def __init__(self, rank: int, ranks: int, message: dict[str, Any]) -> None:
        """message: the first one, with the decoding process's number, and where config.json is. Raises SpecError."""
        self._rank, self._process = rank, message["process"]
        directory = Path(message["directory"])
        place = Place(*message["memory"][0])
        config = EngineConfig.model_validate_json(bytes(attach(self._process, place)))
        if ranks != config.build_config.tp_size:
            raise BackendError(
                f"{ranks} ranks were started for an engine of {config.build_config.tp_size}; are mpiexec and mpi4py of "
                "one MPI library?"
            )
        self._config = config.of_rank(rank)
        self._session = open_session(directory / f"rank{rank}", self._config, "CPUExecutionProvider", {})
        self._new: list[Place] = []
        self._cache = cache_of_all(config, 0, self._attached)
        tensors = [len(config.graph.of_rank(other).own_tensors) for other in range(len(config.graph.ranks))]
        self._tensors = slice(sum(tensors[:rank]), sum(tensors[: rank + 1]))
        states = len(config.graph.states)
        self._states = slice(rank * states, (rank + 1) * states)
        self._passes: dict[tuple[int, ...], OrtPass] = {}
        self._logits, self._inputs = np.empty(0, np.float32), np.empty(0, np.int64)

    def do(self, message: dict[str, Any]) -> None:
        """One message of the decoding process."""
        if message["do"] == "run":
            self._run(*message["pass"])
            return
        self._passes.clear()
        self._new = [Place(*place) for place in message["memory"]]
        if message["do"] == "resize":
            self._cache.resize(message["rows"], message["length"], 0)
        else:
            logits, inputs = self._new
            self._logits = self._view(logits, np.float32)
            self._inputs = self._view(inputs, np.int64)

    def _run(self, first: int, rows: int, query_len: int, num_logits: int) -> None:
        key = (first, rows, query_len, num_logits)
        step = self._passes.get(key)
        if step is None:
            step = self._bind(*key)
            if first == 0 and query_len <= MAX_ROUND_LEN:
                self._passes[key] = step
        names = (step.input_ids, step.write_indices, step.logits_indices, step.state_indices, step.keep_indices)
        for own, given in zip(names, divide(self._inputs, rows, query_len, num_logits), strict=True):
            own[...] = given
        step.run()

    def _bind(self, first: int, rows: int, query_len: int, num_logits: int) -> OrtPass:
        caches = self._cache.part(first, rows)[self._tensors]
        states = self._cache.states(first, rows)[self._states]
        shape = (rows, num_logits, self._config.graph.vocab_size)
        size = int(np.prod(shape))
        # All ranks have the logits; those of the first one are read.
        logits = np.empty(size, np.float32) if self._rank else self._logits[:size]
        return OrtPass(self._session, self._config.graph, caches, states, query_len, logits.reshape(shape))

    def _attached(self, shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        """What the decoding process has allocated for the same array."""
        return as_array(attach(self._process, self._new.pop(0)), shape, dtype)

    def _view(self, place: Place, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        return as_array(attach(self._process, place), (place.nbytes // np.dtype(dtype).itemsize,), dtype)


class Exchange:
    """What collectives call: MPI's all-gather. A pass begins with the first number and has no gaps."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._mpi, self._world, self._next = MPI, MPI.COMM_WORLD, 0
        self.rank, self.ranks = self._world.Get_rank(), self._world.Get_size()
        self.function = cpu_operators.Exchange(self._exchange)

    def _exchange(self, number: int, own: int, everything: int, nbytes: int) -> int:
        try:
            if number not in (0, self._next):
                raise RuntimeError(f"collective {number} follows {self._next - 1}")
            self._next = number + 1
            given = self._mpi.buffer.fromaddress(own, nbytes)
            self._world.Allgather(given, self._mpi.buffer.fromaddress(everything, nbytes * self.ranks))
        except Exception as error:  # An exception cannot pass through C++.
            print(f"rank {self.rank}: {error}", file=sys.stderr)
            return 1
        return 0


class Beats:
    """Says at a steady pace that this process lives, while it computes."""

    def __init__(self, to: socket.socket) -> None:
        self._to, self._lock = to, threading.Lock()
        self.busy = False
        threading.Thread(target=self._run, daemon=True).start()

    def answer(self, message: dict[str, Any]) -> None:
        """Send the answer, after which this process waits."""
        with self._lock:
            self.busy = False
            send(self._to, message)

    def _run(self) -> None:
        while True:
            time.sleep(BEAT_SECONDS)
            with self._lock:
                if self.busy:
                    send(self._to, {"beat": True})


def main() -> None:
    """The rank's loop."""
    exchange = Exchange()
    _stay_on_own_cores(exchange.rank, exchange.ranks)
    own = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    own.connect(os.environ[ADDRESS])
    send(own, {"rank": exchange.rank, "process": os.getpid()})
    cpu_operators.set_exchange(exchange.function)
    beats, rank = Beats(own), None
    while True:
        try:
            message = receive(own)
        except (EOFError, OSError):
            break
        beats.busy = True
        try:
            if rank is None:
                rank = Rank(exchange.rank, exchange.ranks, message)
            else:
                rank.do(message)
            beats.answer({})
        except Exception as error:
            beats.answer({"error": " ".join(str(error).split())[:2000]})
    os._exit(0)  # Without MPI's own end, which waits for all ranks.


def _stay_on_own_cores(rank: int, ranks: int) -> None:
    """A rank has its share of the cores, one behind the other, so that its memory is near them."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= ranks:
        os.sched_setaffinity(0, cores[rank * len(cores) // ranks : (rank + 1) * len(cores) // ranks])


if __name__ == "__main__":
    main()
