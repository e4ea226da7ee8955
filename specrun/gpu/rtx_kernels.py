"""The kernels that TensorRT-RTX compiles for this machine's GPU, stored on disk for later runs.

A plan of TensorRT-RTX holds no machine code. Execution contexts compile it when they are made, which takes seconds.
TensorRT-RTX keeps the compiled kernels in a runtime cache. It refuses a cache of another GPU, driver or version.
TensorRT has no runtime cache; for it, this module only makes runtime configurations.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from specrun.engine_dir.directories import write_whole
from specrun.engine_dir.user_cache import user_cache

if TYPE_CHECKING:
    from tensorrt import ICudaEngine, IRuntimeConfig


class KernelCache:
    """The runtime cache that one engine's contexts share."""

    def __init__(self, engine: ICudaEngine, name: str) -> None:
        """Load the kernels that an earlier run stored under the same ``name``."""
        self._engine = engine
        self._file = user_cache() / f"{name}.kernels"
        self._configs: list[IRuntimeConfig] = []  # They must outlive the contexts that were made with them.
        config = engine.create_runtime_config()
        self._cache = config.create_runtime_cache() if hasattr(config, "create_runtime_cache") else None
        if self._cache is not None and self._file.is_file():
            self._cache.deserialize(self._file.read_bytes())  # Returns False where it refuses; the cache stays empty.

    def runtime_config(self, trt: Any, fixed: bool) -> IRuntimeConfig:
        """The configuration of a new context, which takes its memory from the caller and shares the runtime cache.

        fixed: whether the context's shapes never change.
        """
        config = self._engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(trt.ExecutionContextAllocationStrategy.USER_MANAGED)
        if self._cache is not None:
            config.set_runtime_cache(self._cache)
            strategies = trt.DynamicShapesKernelSpecializationStrategy
            # LAZY compiles kernels for a shape in the background and uses slower ones until then. A CUDA graph would
            # keep the slower ones, so fixed shapes compile at once. Prompts of every length would take too long for it.
            strategy = strategies.EAGER if fixed else strategies.LAZY
            config.dynamic_shapes_kernel_specialization_strategy = strategy
        self._configs.append(config)
        return config

    def save(self) -> None:
        """Store the compiled kernels. A full or read-only disk is no error: then nothing is stored."""
        content = self._cache.serialize() if self._cache is not None else None
        if content is None:
            return
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_whole(self._file, bytes(memoryview(content)), mode=0o600)
        except OSError:
            return

    def close(self) -> None:
        """Store the compiled kernels and free the engine. All its contexts must have been freed before."""
        self.save()
        self._configs.clear()
        del self._engine, self._cache
