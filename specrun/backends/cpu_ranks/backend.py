"""An engine of several ranks, as the decoding process sees it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from specrun import __version__
from specrun.backends import Backend, Pass
from specrun.backends.cpu_ranks.group import RankGroup
from specrun.backends.cpu_ranks.shared_memory import SharedMemory
from specrun.backends.ort import MAX_ROUND_LEN
from specrun.engine_dir.config import EngineConfig
from specrun.kv_cache.host import HostKVCache


class RanksBackend(Backend):
    """An engine whose ranks are processes. Caches of ranks on this machine are memory of this process: it moves rows.

    Ranks on other machines own their caches, and move rows when this process tells them to.
    """

    def __init__(self, directory: Path, config: EngineConfig, blocks: int, hosts: Sequence[str] = ()) -> None:
        """hosts: the ranks' machines, this one first; (): all are on this one.

        Raises BackendError where the ranks do not start.
        """
        self.config = config
        self.cache_owner: Backend | None = None
        ranks = config.build_config.tp_size
        self._group = RankGroup(directory, ranks, hosts)
        self._memory = SharedMemory()
        elsewhere = range(self._group.here, ranks)
        here = config.of_first_ranks(self._group.here)
        self.cache = RanksCache(here, blocks, self._memory, partial(self._move, elsewhere))
        self._logits = np.empty(0, np.float32)
        self._passes: dict[tuple[int, ...], RanksPass] = {}
        opening = {"directory": str(directory.absolute()), "process": os.getpid()}
        opening |= {"here": self._group.here, "blocks": blocks, "versions": versions()}
        try:
            self._group.tell(opening, config.model_dump_json().encode())
        except BaseException:
            self.close()
            raise

    @override
    def resize(self, rows: int, length: int, used: int) -> None:
        self._passes.clear()
        self.cache.resize(rows, length, used)
        self._tell("resize", rows=rows, length=length, used=used)

    @override
    def bind(self, first: int, num_rows: int, query_len: int, num_logits: int) -> RanksPass:
        """Passes share the memory of their logits."""
        key = (first, num_rows, query_len, num_logits)
        if known := self._passes.get(key):
            return known
        shape = (num_rows, num_logits, self.config.graph.vocab_size)
        if math.prod(shape) > self._logits.size:
            self._passes.clear()
            self._logits = self._memory.zeros((math.prod(shape),), np.float32)
            self._tell("memory")
        rank_pass = RanksPass(self._group, key, self._logits[: math.prod(shape)].reshape(shape))
        if first == 0 and query_len <= MAX_ROUND_LEN:
            self._passes[key] = rank_pass
        return rank_pass

    @override
    def problem(self) -> str | None:
        return self._group.problem()

    @override
    def close(self) -> None:
        self._group.close()
        self._passes.clear()
        self._memory.forget()
        self.cache.release()
        self._logits = np.empty(0, np.float32)

    def _tell(self, what: str, **more: int) -> None:
        self._group.tell({"do": what, "memory": self._memory.told(), **more})
        self._memory.forget()

    def _move(self, ranks: range, operation: str, *arguments: Any) -> None:
        """Have ``ranks`` do to their caches what was done to those here."""
        if ranks:
            self._group.tell({"do": operation, "arguments": arguments}, to=ranks)


class RanksPass(Pass):
    """A pass that all ranks run together."""

    def __init__(self, group: RankGroup, key: tuple[int, ...], logits: npt.NDArray[np.float32]) -> None:
        """key: first row, rows, tokens and logits of a row."""
        self._group, self._message = group, {"do": "run", "pass": key}
        self._inputs = np.zeros(num_inputs(*key[1:]), np.int64)
        self.logits = logits
        self.input_ids, self.write_indices, self.logits_indices, self.state_indices, self.keep_indices = divide(
            self._inputs, *key[1:]
        )

    @override
    def run(self) -> None:
        """Raises EngineLostError where a rank is lost."""
        self._group.tell(self._message, self._inputs.tobytes())


class RanksCache(HostKVCache):
    """The caches of the ranks on this machine. Ranks elsewhere get a message for each call that changes a row."""

    def __init__(self, config: EngineConfig, blocks: int, memory: SharedMemory, tell: Callable[..., None]) -> None:
        """config: with the ranks of this machine. tell: takes the name of an operation, and its arguments."""
        graph, reads_hidden = config.graph, config.reads_hidden
        storage = graph.cache_element.storage
        super().__init__(graph.own_tensors, storage, blocks, graph.row_states, memory.zeros, reads_hidden)
        self._tell = tell

    @override
    def clear(self, row: int) -> None:
        super().clear(row)
        self._tell("clear", row)

    @override
    def clear_states(self, row: int) -> None:
        super().clear_states(row)
        self._tell("clear_states", row)

    @override
    def swap(self, row: int, other: int, lengths: tuple[int, int]) -> None:
        super().swap(row, other, lengths)
        self._tell("swap", row, other, lengths)

    @override
    def save(self, row: int, start: int, blocks: Sequence[int]) -> None:
        super().save(row, start, blocks)
        self._tell("save", row, start, blocks)

    @override
    def load(self, row: int, start: int, blocks: Sequence[int]) -> None:
        super().load(row, start, blocks)
        self._tell("load", row, start, blocks)

    @override
    def save_state(self, row: int, slot: int) -> None:
        super().save_state(row, slot)
        self._tell("save_state", row, slot)

    @override
    def load_state(self, row: int, slot: int) -> None:
        super().load_state(row, slot)
        self._tell("load_state", row, slot)


def versions() -> dict[str, str]:
    """Of what all ranks must have alike."""
    return {"specrun": __version__, "onnxruntime": version("onnxruntime")}


def num_inputs(rows: int, query_len: int, num_logits: int) -> int:
    """How many numbers a pass's inputs have."""
    return rows * (query_len + num_logits + 3)


def divide(numbers: npt.NDArray[np.int64], rows: int, query_len: int, num_logits: int) -> list[npt.NDArray[np.int64]]:
    """A pass's inputs, which lie one after the other."""
    arrays, start = [], 0
    for shape in ((rows, query_len), (rows,), (rows, num_logits), (rows,), (rows,)):
        size = math.prod(shape)
        arrays.append(numbers[start : start + size].reshape(shape))
        start += size
    return arrays
