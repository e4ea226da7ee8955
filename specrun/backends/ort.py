"""ONNX Runtime on the CPU and on CUDA, with the cache updated in place."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from typing_extensions import override

from specrun import cpu_operators
from specrun.backends import Backend
from specrun.backends.ort_session import import_ort, keep_in_children
from specrun.backends.ort_session import session_options as session_options
from specrun.engine_dir.config import GRAPH_NAME, EngineConfig, GraphInfo
from specrun.engine_dir.contract import (
    INPUT_IDS,
    KEEP_INDICES,
    LOGITS,
    LOGITS_INDICES,
    STATE_INDICES,
    WRITE_INDICES,
)
from specrun.engine_dir.dtypes import DTYPES, ElementType
from specrun.errors import BackendError, EngineDirError
from specrun.kv_cache.host import HostKVCache

_OLDEST_FOR_CUDA = (1, 31)
"""The first release with change 28958: before, ``is_causal`` counted from the cache's first key, and tokens were wrong.

1.31 is the release that the graphs were tried with.
"""
MAX_ROUND_LEN = 16
"""Tokens of a row in a round at most; longer inputs are prompts."""


class OrtBackend(Backend):
    """An engine in ONNX Runtime. Inputs, outputs and cache are bound by address, so nothing is copied."""

    def __init__(
        self,
        directory: Path,
        config: EngineConfig,
        blocks: int,
        shared_pool: bool = False,
        cache_owner: Backend | None = None,
    ) -> None:
        self.config = config
        self.cache_owner = cache_owner
        self._session = open_session(
            directory, config, "CPUExecutionProvider", {}, shared_pool
        )  # It knows whether the sizes are true.
        graph = config.graph
        storage, reads_hidden = graph.cache_element.storage, config.reads_hidden
        self.cache = HostKVCache(graph.own_tensors, storage, blocks, graph.row_states, reads_hidden=reads_hidden)
        self._rows: dict[tuple[int, ...], list[Any]] = {}
        """``values_of`` those that passes are bound to."""
        self._passes: dict[tuple[int, ...], OrtPass] = {}
        self._logits = np.empty(0, np.float32)

    @override
    def resize(self, rows: int, length: int, used: int) -> None:
        """The graph's S_max is free here, so the cache is as long as its rows need: attention costs less."""
        self._forget_rows()
        self.cache.resize(rows, length, used)

    @override
    def bind(self, first: int, num_rows: int, query_len: int, num_logits: int) -> OrtPass:
        """Passes share the memory of their logits."""
        shared = self._shared_memory()
        key = (first, num_rows, query_len, num_logits, shared)
        if known := self._passes.get(key):
            return known
        shape = (num_rows, num_logits, self.config.graph.vocab_size)
        if (size := math.prod(shape)) > self._logits.size:
            self._passes.clear()
            self._logits = np.empty(size, np.float32)
        logits = self._logits[:size].reshape(shape)
        if (rows := self._rows.get((first, num_rows, shared))) is None:
            rows = self._values(first, num_rows)
        ort_pass = OrtPass(self._session, self.config.graph, rows, query_len, logits)
        if first == 0 and query_len <= MAX_ROUND_LEN:  # Prompts are read anywhere, in any length.
            self._passes[key], self._rows[first, num_rows, shared] = ort_pass, rows
        return ort_pass

    def _values(self, first: int, num_rows: int) -> list[Any]:
        """``values_of`` rows of the cache."""
        cache = self.cache.part(first, num_rows)
        if self.cache_owner:
            cache.append(self.cache_owner.cache.part(first, num_rows)[-1])
        return values_of([*cache, *self.cache.states(first, num_rows)])

    def _shared_memory(self) -> int:
        """The address of the owner's cache, which is another one after it has grown; 0 without an owner.

        Raises RuntimeError where that cache has another size than this one.
        """
        if not self.cache_owner:
            return 0
        shared = self.cache_owner.cache
        if (shared.rows, shared.length) != (self.cache.rows, self.cache.length):
            raise RuntimeError("a head's cache must be resized together with its target's")
        return shared.address

    def _forget_rows(self) -> None:
        """Their memory is about to go."""
        self._passes.clear()
        self._rows.clear()

    @override
    def problem(self) -> str | None:
        return None

    @override
    def close(self) -> None:
        self._forget_rows()
        self._session = None
        self._logits = np.empty(0, np.float32)
        self.cache.release()


class OrtPass:
    """A session's inputs and outputs for one shape and some rows of the cache: bound once, run often."""

    def __init__(
        self,
        session: Any,
        graph: GraphInfo,
        rows: Sequence[Any],
        query_len: int,
        logits: npt.NDArray[np.float32],
    ) -> None:
        """rows: ``values_of`` the rows' cache tensors, and of what recurrent layers keep of them."""
        num_rows, num_logits, _ = logits.shape
        self.logits = logits
        self.input_ids = np.zeros((num_rows, query_len), np.int64)
        self.write_indices = np.zeros(num_rows, np.int64)
        self.logits_indices = np.zeros((num_rows, num_logits), np.int64)
        self.state_indices, self.keep_indices = np.zeros((2, num_rows), np.int64)
        inputs = {
            INPUT_IDS: self.input_ids,
            WRITE_INDICES: self.write_indices,
            LOGITS_INDICES: self.logits_indices,
        }
        if graph.states:
            inputs |= {STATE_INDICES: self.state_indices, KEEP_INDICES: self.keep_indices}
        binding = session.io_binding()
        for name, value in zip(inputs, values_of(inputs.values()), strict=True):
            binding.bind_ortvalue_input(name, value)
        binding.bind_ortvalue_output(LOGITS, *values_of([logits]))
        names = list(zip(graph.past_names, graph.present_names, strict=True))
        names += [(state.past_name, state.present_name) for state in graph.states]
        for (past, present), value in zip(names, rows, strict=True):
            binding.bind_ortvalue_input(past, value)
            binding.bind_ortvalue_output(present, value)
        self._binding = binding  # It keeps alive what is bound, also where passes run without it.
        self.run = _bound_run(session, binding)


def _bound_run(session: Any, binding: Any) -> Callable[[], None]:
    """``session.run_with_iobinding`` of ``binding``, without its checks in Python, which take microseconds a pass."""
    inner, bound = getattr(session, "_sess", None), getattr(binding, "_iobinding", None)
    if inner is None or bound is None:  # Another release.
        return functools.partial(session.run_with_iobinding, binding)
    return functools.partial(inner.run_with_iobinding, bound, None)


def values_of(arrays: Iterable[npt.NDArray[Any]]) -> list[Any]:
    """ONNX Runtime's values in the arrays' memory. To make one takes longer than to bind it."""
    return list(map(import_ort().OrtValue.ortvalue_from_numpy, arrays))


def open_session(
    directory: Path, config: EngineConfig, provider: str, provider_options: dict[str, str], shared_pool: bool = False
) -> Any:
    """A session on the engine's graph, checked against the contract. Raises EngineDirError and BackendError."""
    ort, options = session_options(shared_pool)
    if provider not in ort.get_available_providers():
        raise BackendError(
            f"onnxruntime {ort.__version__} has no {provider}; pip install onnxruntime-gpu in place of onnxruntime"
        )
    if provider == "CUDAExecutionProvider":
        require_release(ort.__version__)
        options.enable_mem_pattern = False  # It would allocate in the second call of a shape, which is captured.
        # Or weights lie in an arena that grows by powers of 2: for an 8B and a 1B by 3.4 GB more than they have.
        options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
    if config.backend.needs_cpu_operators:
        cpu_operators.register(options)
    optimized = provider == "CPUExecutionProvider"  # When it was built, for this processor.
    level = ort.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_DISABLE_ALL if optimized else level.ORT_ENABLE_ALL
    try:
        session = ort.InferenceSession(directory / GRAPH_NAME, options, providers=[(provider, provider_options)])
    except Exception as error:  # ONNX Runtime's exceptions share no base class.
        raise EngineDirError(f"{directory}: onnxruntime {ort.__version__} does not load it ({error})") from error
    if session.get_providers()[0] != provider:  # ONNX Runtime falls back to the CPU with no more than a warning.
        raise BackendError(f"{directory}: onnxruntime {ort.__version__} could not start {provider} on this machine")
    keep_in_children(session)
    _check_contract(directory, config, session)
    return session


def require_release(version: str) -> None:
    """Raise BackendError if onnxruntime ``version`` is too old to run on CUDA."""
    major, minor = (int(part) for part in version.split(".")[:2])
    if (major, minor) < _OLDEST_FOR_CUDA:
        raise BackendError(
            f"onnxruntime {version} is too old for CUDA: its attention may compute something else; pip install "
            "'onnxruntime-gpu>=1.31'"
        )


def _check_contract(directory: Path, config: EngineConfig, session: Any) -> None:
    """Raise EngineDirError unless the graph is what config.json says: memory is bound by these sizes."""
    caches = config.graph.cache_tensors
    tokens: tuple[str, list[int]] = (_tensor_of(DTYPES["int64"]), [])
    expected = dict.fromkeys((INPUT_IDS, WRITE_INDICES, LOGITS_INDICES), tokens)
    for names in (config.graph.past_names, config.graph.present_names):
        for name, cache in zip(names, caches, strict=True):
            element = DTYPES["float32"] if cache.in_float32 else config.graph.cache_element
            expected[name] = (_tensor_of(element), [cache.heads, cache.head_dim])
    for state in config.graph.states:
        expected |= dict.fromkeys((STATE_INDICES, KEEP_INDICES), tokens)
        sizes = [size for number, size in enumerate(state.row_shape(0)) if number or state.history is None]
        expected |= dict.fromkeys((state.past_name, state.present_name), (_tensor_of(DTYPES["float32"]), sizes))
    expected[LOGITS] = (_tensor_of(DTYPES["float32"]), [config.graph.vocab_size])
    actual = {
        value.name: (value.type, [size for size in value.shape if isinstance(size, int)])
        for value in (*session.get_inputs(), *session.get_outputs())
    }
    for name in sorted(expected.keys() | actual.keys()):
        if expected.get(name) != actual.get(name):
            raise EngineDirError(
                f"{directory}: the graph's {name} is {actual.get(name)}, config.json says {expected.get(name)}; "
                "build the engine again"
            )


def _tensor_of(element: ElementType) -> str:
    """ONNX Runtime's name of a tensor's type."""
    return f"tensor({element.onnxruntime})"
