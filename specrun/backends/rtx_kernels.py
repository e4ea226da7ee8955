"""The kernels that TensorRT-RTX compiles on the GPU at hand, kept from run to run.

A plan of TensorRT-RTX holds no machine code: contexts compile it when they are made, which takes seconds. The runtime
cache holds what was compiled; its content is TensorRT-RTX's own, and it refuses one of another GPU, driver or version.
TensorRT has none of this: there, this is an ordinary runtime configuration.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any


class KernelCache:
    """The runtime cache that one engine's contexts share."""

    def __init__(self, engine: Any, cache: Any, file: Path) -> None:
        self._engine = engine
        self._cache = cache
        self._file = file
        self._configs: list[Any] = []  # They must outlive the contexts made with them.

    @classmethod
    def open(cls, engine: Any, name: str) -> KernelCache:
        """The cache of the plan called ``name``, with what an earlier run left in it."""
        file = _folder() / f"{name}.kernels"
        config = engine.create_runtime_config()
        cache = config.create_runtime_cache() if hasattr(config, "create_runtime_cache") else None
        if cache is not None and file.is_file():
            cache.deserialize(file.read_bytes())  # False: from another GPU, driver or version. Begin anew.
        return cls(engine, cache, file)

    def runtime_config(self, trt: Any, fixed: bool) -> Any:
        """The configuration of a new context: memory is ours, kernels are kept.

        fixed: whether its shapes never change.
        """
        config = self._engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if self._cache is not None:
            config.set_runtime_cache(self._cache)
            strategies = trt.DynamicShapesKernelSpecializationStrategy
            # Compiled in the background, kernels would come too late for a CUDA graph, which keeps the slow ones. But
            # nobody waits for those of a prompt's length: until they are there, others serve.
            strategy = strategies.EAGER if fixed else strategies.LAZY
            config.dynamic_shapes_kernel_specialization_strategy = strategy
        self._configs.append(config)
        return config

    def save(self) -> None:
        """Keep what was compiled. A full or read-only disk costs the next run seconds, and this one nothing."""
        content = self._cache.serialize() if self._cache is not None else None
        if content is None:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self._file.parent, delete=False) as temporary:
                temporary.write(memoryview(content))
            Path(temporary.name).replace(self._file)
        except OSError:
            return

    def close(self) -> None:
        """Keep what was compiled, and let go of the engine. Contexts must have gone before: they need their configs."""
        self.save()
        self._configs.clear()
        self._engine = self._cache = None


def _folder() -> Path:
    """See the XDG base directory specification."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "specrun"
