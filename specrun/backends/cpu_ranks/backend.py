"""An engine of several ranks, as the decoding process sees it."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specrun.backends import Backend
from specrun.backends.cpu_ranks.group import RankGroup
from specrun.backends.cpu_ranks.shared_memory import SharedMemory
from specrun.backends.ort import MAX_ROUND_LEN
from specrun.engine_dir.config import EngineConfig
from specrun.kv_cache.host import HostKVCache


class RanksBackend:
    """See ``Backend``. The caches of all ranks are memory of this process, so rows move without a word to them."""

    def __init__(self, directory: Path, config: EngineConfig, blocks: int) -> None:
        """Raises BackendError where the ranks do not start."""
        self.config = config
        self.cache_owner: Backend | None = None
        self._group = RankGroup(directory, config.build_config.tp_size)
        self._memory = SharedMemory()
        self.cache = cache_of_all(config, blocks, self._memory.zeros)
        self._logits = np.empty(0, np.float32)
        self._inputs = np.empty(0, np.int64)
        self._passes: dict[tuple[int, ...], RanksPass] = {}
        described = config.model_dump_json().encode()  # It may be too long for a message.
        self._memory.zeros((len(described),), np.uint8)[:] = np.frombuffer(described, np.uint8)
        try:
            self._tell("open", directory=str(directory.absolute()), process=os.getpid())
        except BaseException:
            self.close()
            raise

    def resize(self, rows: int, length: int, used: int) -> None:
        """See ``Backend``."""
        self._passes.clear()
        self.cache.resize(rows, length, used)
        self._tell("resize", rows=rows, length=length)

    def bind(self, first: int, num_rows: int, query_len: int, num_logits: int) -> RanksPass:
        """See ``Backend``. Passes share the memory of their logits."""
        key = (first, num_rows, query_len, num_logits)
        if known := self._passes.get(key):
            return known
        shape = (num_rows, num_logits, self.config.graph.vocab_size)
        numbers = num_rows * (query_len + num_logits + 3)
        if math.prod(shape) > self._logits.size or numbers > self._inputs.size:
            self._passes.clear()
            self._logits = self._memory.zeros((max(math.prod(shape), self._logits.size),), np.float32)
            self._inputs = self._memory.zeros((max(numbers, self._inputs.size),), np.int64)
            self._tell("memory")
        logits = self._logits[: math.prod(shape)].reshape(shape)
        made = RanksPass(self._group, key, self._inputs[:numbers], logits)
        if first == 0 and query_len <= MAX_ROUND_LEN:
            self._passes[key] = made
        return made

    def problem(self) -> str | None:
        """See ``Backend``."""
        return self._group.problem()

    def close(self) -> None:
        """See ``Backend``."""
        self._group.close()
        self._passes.clear()
        self._memory.forget()
        self.cache.release()
        self._logits, self._inputs = np.empty(0, np.float32), np.empty(0, np.int64)

    def _tell(self, what: str, **more: int | str) -> None:
        self._group.send({"do": what, "memory": self._memory.told(), **more})
        self._group.wait()
        self._memory.forget()


class RanksPass:
    """See ``Pass``. Its inputs are copied where all ranks see them."""

    def __init__(
        self,
        group: RankGroup,
        key: tuple[int, ...],
        shared: npt.NDArray[np.int64],
        logits: npt.NDArray[np.float32],
    ) -> None:
        """shared: int64 [N], where the inputs go. key: first row, rows, tokens and logits of a row."""
        self._group, self._shared, self._message = group, shared, {"do": "run", "pass": key}
        self._inputs = np.zeros(len(shared), np.int64)
        self.logits = logits
        self.input_ids, self.write_indices, self.logits_indices, self.state_indices, self.keep_indices = divide(
            self._inputs, *key[1:]
        )

    def run(self) -> None:
        """See ``Pass``. Raises EngineLostError where a rank is lost."""
        self._shared[:] = self._inputs
        self._group.send(self._message)
        self._group.wait()


def divide(numbers: npt.NDArray[np.int64], rows: int, query_len: int, num_logits: int) -> list[npt.NDArray[np.int64]]:
    """A pass's inputs, which lie one after the other."""
    made, start = [], 0
    for shape in ((rows, query_len), (rows,), (rows, num_logits), (rows,), (rows,)):
        size = math.prod(shape)
        made.append(numbers[start : start + size].reshape(shape))
        start += size
    return made


def cache_of_all(config: EngineConfig, blocks: int, allocate: Any) -> HostKVCache:
    """The caches of all ranks: their tensors one after the other, in the order of the ranks."""
    graph = config.graph
    states = [state.row_shape(graph.replays) for state in graph.states] * len(graph.ranks)
    return HostKVCache(graph.own_tensors, graph.cache_element.storage, blocks, states, allocate)
