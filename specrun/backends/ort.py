"""ONNX Runtime on the CPU, with the cache updated in place."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from specrun.contract import INPUT_IDS, LOGITS, LOGITS_INDICES, WRITE_INDICES, past_names, present_names
from specrun.engine_dir import EngineConfig
from specrun.errors import BackendError, EngineDirError

_GRAPH = "model.onnx"
_pool_made = False


class OrtBackend:
    """See ``Backend``. Inputs, outputs and cache are bound by address, so nothing is copied."""

    def __init__(self, directory: Path, config: EngineConfig) -> None:
        self.config = config
        ort, options = session_options()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL  # Done when it was built.
        try:
            self._session = ort.InferenceSession(directory / _GRAPH, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime's exceptions share no base class.
            raise EngineDirError(f"{directory}: onnxruntime {ort.__version__} does not load it ({error})") from error
        _check_contract(directory, config, self._session)
        self._binding = self._session.io_binding()
        self._cache: list[npt.NDArray[np.float32]] = []
        self._logits = np.empty((0, 0, 0), np.float32)

    def allocate_cache(self, rows: int, length: int) -> int:
        """The graph's S_max is free here, so the cache is as long as the batch needs: attention costs less."""
        graph = self.config.graph
        self._binding = self._session.io_binding()
        self._cache = [np.zeros((rows, shape.heads, length, shape.width), np.float32) for shape in graph.caches]
        names = zip(past_names(graph.layers), present_names(graph.layers), self._cache, strict=True)
        for past, present, memory in names:
            self._bind(self._binding.bind_input, past, memory)
            self._bind(self._binding.bind_output, present, memory)
        self._logits = np.empty((0, 0, 0), np.float32)
        return length

    def run(
        self,
        input_ids: npt.NDArray[np.int64],
        write_indices: npt.NDArray[np.int64],
        logits_indices: npt.NDArray[np.int64],
    ) -> npt.NDArray[np.float32]:
        """See ``Backend.run``."""
        shape = (*logits_indices.shape, self.config.graph.vocab_size)
        if self._logits.shape != shape:
            self._logits = np.empty(shape, np.float32)
            self._bind(self._binding.bind_output, LOGITS, self._logits)
        self._bind(self._binding.bind_input, INPUT_IDS, input_ids)
        self._bind(self._binding.bind_input, WRITE_INDICES, write_indices)
        self._bind(self._binding.bind_input, LOGITS_INDICES, logits_indices)
        self._session.run_with_iobinding(self._binding)
        return self._logits

    @staticmethod
    def _bind(bind: Any, name: str, array: npt.NDArray[Any]) -> None:
        bind(name, "cpu", 0, array.dtype, array.shape, array.ctypes.data)


def _check_contract(directory: Path, config: EngineConfig, session: Any) -> None:
    """Raise EngineDirError unless the graph is what config.json says: memory is bound by these sizes."""
    layers = config.graph.layers
    caches = [[shape.heads, shape.width] for shape in config.graph.caches]
    tokens: tuple[str, list[int]] = ("tensor(int64)", [])
    expected = dict.fromkeys((INPUT_IDS, WRITE_INDICES, LOGITS_INDICES), tokens)
    for names in (past_names(layers), present_names(layers)):
        expected |= {name: ("tensor(float)", sizes) for name, sizes in zip(names, caches, strict=True)}
    expected[LOGITS] = ("tensor(float)", [config.graph.vocab_size])
    found = {
        value.name: (value.type, [size for size in value.shape if isinstance(size, int)])
        for value in (*session.get_inputs(), *session.get_outputs())
    }
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise EngineDirError(
                f"{directory}: the graph's {name} is {found.get(name)}, config.json says {expected.get(name)}; "
                "build the engine again"
            )


def session_options() -> tuple[Any, Any]:
    """The onnxruntime module, and options for a session on the thread pool that all sessions of the process share.

    Two sessions with pools of their own slow each other down: the idle one's threads spin on the busy one's cores.
    Once the shared pool exists, onnxruntime refuses sessions that want their own. Raises BackendError.
    """
    global _pool_made
    try:
        import onnxruntime as ort
    except ImportError as error:
        raise BackendError("onnxruntime is not installed: pip install onnxruntime") from error
    if not _pool_made:
        ort.set_global_thread_pool_sizes(len(os.sched_getaffinity(0)), 1)
        _pool_made = True
    options = ort.SessionOptions()
    options.use_per_session_threads = False
    options.log_severity_level = 3
    return ort, options
