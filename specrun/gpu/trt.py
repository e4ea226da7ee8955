"""TensorRT and TensorRT-RTX plans on a GPU. Both packages have the same interface under two import names.

All execution contexts share one workspace. They can, because all work is queued on one stream.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from typing_extensions import override

from specrun.devices import Device, DeviceArray, rtx_plugins
from specrun.engine_dir.config import PLAN_SUFFIX, EngineConfig, Profile
from specrun.engine_dir.contract import (
    INPUT_IDS,
    KEEP_INDICES,
    LOGITS,
    LOGITS_INDICES,
    STATE_INDICES,
    WRITE_INDICES,
)
from specrun.errors import BackendError, EngineDirError
from specrun.gpu.backend import DeviceBackend, Feed, bound_tensors
from specrun.gpu.cache import DeviceKVCache
from specrun.gpu.rtx_kernels import KernelCache
from specrun.gpu.states import DeviceStates
from specrun.optional_packages import how_to_install, import_package

if TYPE_CHECKING:
    from tensorrt import ICudaEngine, IExecutionContext, ILogger, Runtime


class Call(NamedTuple):
    """The sizes of one forward pass."""

    batch: int
    sequence: int
    logits: int


def choose_profile(profiles: Sequence[Profile], call: Call, fixed: bool) -> int:
    """The index of the profile for ``call``. Raises BackendError where none covers it.

    A call of a round (``fixed``) gets the narrowest profile, which has the fastest kernels for a few tokens. A call for
    a prompt gets a context profile.
    """

    def covers(profile: Profile) -> bool:
        ranges = (profile.batch, profile.sequence, profile.logits)
        return all(low <= size <= high for size, (low, _, high) in zip(call, ranges, strict=True))

    covering = [index for index, profile in enumerate(profiles) if covers(profile)]
    if not fixed:
        covering = [index for index in covering if profiles[index].name == "context"]
    if not covering:
        raise BackendError(
            f"no profile of the engine covers batch {call.batch}, {call.sequence} tokens and {call.logits} logits; "
            "build it with larger --max_batch_size, --max_input_len or --max_draft_len"
        )
    return min(covering, key=lambda index: (profiles[index].sequence[2], profiles[index].batch[2]))


def input_shapes(config: EngineConfig, call: Call) -> dict[str, tuple[int, ...]]:
    """The shape of every input in ``call``, by name."""
    length = config.build_config.cache_length
    shapes: dict[str, tuple[int, ...]] = {
        INPUT_IDS: (call.batch, call.sequence),
        WRITE_INDICES: (call.batch,),
        LOGITS_INDICES: (call.batch, call.logits),
    }
    for name, cache in zip(config.graph.past_names, config.graph.cache_tensors, strict=True):
        shapes[name] = (call.batch, cache.heads, length, cache.head_dim)
    if config.graph.states:
        shapes |= {STATE_INDICES: (call.batch,), KEEP_INDICES: (call.batch,)}
    for state in config.graph.states:
        shapes[state.past_name] = (call.batch, *state.row_shape(config.graph.replays))
    return shapes


def check_plan(plan: Path, config: EngineConfig, trt: Any, runtime: Runtime, gpu: int, capability: str) -> None:
    """Raise EngineDirError where this version of TensorRT or this GPU cannot run the plan. Nothing is loaded yet.

    trt: the vendor's package; runtime: its Runtime. gpu: the GPU's number; capability: its compute capability, such as
    9.0.
    """
    backend, directory = config.backend, plan.parent
    if backend.version != trt.__version__:
        raise EngineDirError(
            f"{directory}: compiled by {backend.name} {backend.version}, {trt.__version__} is installed; build the "
            f"engine again, or pip install {backend.name.replace('_', '-')}=={backend.version}"
        )
    if backend.name == "tensorrt" and backend.compute_capabilities and capability not in backend.compute_capabilities:
        built = ", ".join(backend.compute_capabilities)
        raise EngineDirError(
            f"{directory}: compiled for compute capability {built}, GPU {gpu} has {capability}; build the engine for "
            f"it, on this machine, with specbuild engine --device cuda:{gpu}"
        )
    if hasattr(runtime, "get_engine_validity"):
        with plan.open("rb") as file:
            header = file.read(int(runtime.engine_header_size))
        validity, diagnostics = runtime.get_engine_validity(header)
        if validity == trt.EngineValidity.INVALID:
            names = trt.EngineInvalidityDiagnostics.__members__.items()
            reasons = [name for name, value in names if int(value) & int(diagnostics)] or ["no reason given"]
            raise EngineDirError(
                f"{directory}: {backend.name} {trt.__version__} cannot run this plan on GPU {gpu} (compute "
                f"capability {capability}): {', '.join(reasons)}"
            )


@dataclass
class _Context:
    """An execution context, with the shapes and the cache row that were last set."""

    execution: IExecutionContext
    call: Call | None = None
    first: int | None = None
    """First of the cache rows that are bound; None before the first call."""


class TrtBackend(DeviceBackend):
    """Runs a plan of TensorRT or TensorRT-RTX on one GPU."""

    def __init__(
        self,
        directory: Path,
        config: EngineConfig,
        device: Device,
        capability: str,
        cache_owner: DeviceBackend | None = None,
    ) -> None:
        """Load the plan onto ``device``, whose compute capability is ``capability``, such as 9.0.

        cache_owner: for a head, its target on the same device.

        Raises EngineDirError where the plan does not fit the device or the contract, and BackendError where TensorRT or
        its plug-ins are not installed.
        """
        self.config = config
        self.device, self.devices = device, [device]
        self._cache_owner = cache_owner
        try:
            self._trt = import_package(config.backend.name)
        except ImportError as error:
            name = config.backend.name
            raise BackendError(f"{name} is not installed: {how_to_install(name)}") from error
        device.activate()
        if config.backend.plugins:
            rtx_plugins.load()
        self._log = _log(self._trt)
        # A runtime must outlive its engines, and an engine its contexts. Python's garbage collection ignores that.
        self._runtime: Runtime = self._trt.Runtime(self._log)
        plan = directory / next(name for name in config.files if name.endswith(PLAN_SUFFIX))
        check_plan(plan, config, self._trt, self._runtime, device.number, capability)
        self._engine: ICudaEngine = self._runtime.deserialize_cuda_engine(plan.read_bytes())
        if self._engine is None:
            raise EngineDirError(f"{directory}: {config.backend.name} does not load the plan: {self._log.reason()}")
        _check_engine(directory, config, self._engine)
        self._kernels = KernelCache(self._engine, f"{config.files[plan.name].sha256[:16]}-{capability}")
        self.communicator: Any = None
        """NCCL's communicator of a rank, in a capsule; None without ranks. New contexts receive it."""
        self._contexts: dict[Call | int, _Context] = {}
        self._workspace: DeviceArray | None = None

    @property
    @override
    def capturable(self) -> bool:
        """TensorRT's contexts always are; TensorRT-RTX's report it."""
        fixed = [context.execution for key, context in self._contexts.items() if isinstance(key, Call)]
        return all(
            not hasattr(context, "is_stream_capturable") or context.is_stream_capturable(self.device.stream)
            for context in fixed
        )

    @property
    @override
    def workspace_bytes(self) -> int:
        """Bytes for the plan's largest profile."""
        return int(self._engine.device_memory_size_v2)

    @override
    def allocate_cache(self) -> None:
        """A plan takes rows of exactly cache_length positions."""
        build = self.config.build_config
        self._workspace = self.device.zeros((self.workspace_bytes,), np.uint8)
        graph, size = self.config.graph, (build.max_batch_size, build.cache_length)
        states = DeviceStates(self.device, graph.states, graph.replays, size[0]) if graph.states else None
        kind, new = graph.cache_element.storage, self.config.new_positions
        self.cache = DeviceKVCache(self.device, graph.own_tensors, kind, *size, new, states)

    @override
    def enqueue(self, feed: Feed, logits: DeviceArray, first: int, fixed: bool) -> None:
        """Raises BackendError where TensorRT refuses the call.

        A captured graph holds values that a context computed from its shapes. So every shape that may be captured has
        its own context, whose shapes never change. Prompts share one context for each profile.
        """
        self.device.activate()
        call = Call(feed.input_ids.shape[0], feed.input_ids.shape[1], feed.logits_indices.shape[1])
        profile = choose_profile(self.config.build_config.profiles, call, fixed)
        key = call if fixed else profile
        context = self._contexts.get(key)
        if context is None:
            context = self._contexts[key] = _Context(self._new_execution(profile, fixed))
        if context.call != call:
            for name, shape in input_shapes(self.config, call).items():
                self._require(context.execution.set_input_shape(name, shape), f"the shape {shape} of {name}")
            context.call = call
        if context.first != first:
            self._bind_cache(context.execution, first)
            context.first = first
        for name, array in {**feed.by_name(), LOGITS: logits}.items():
            self._require(context.execution.set_tensor_address(name, array.address), f"the address of {name}")
        self._require(context.execution.execute_async_v3(self.device.stream), "to run")
        if not self.config.writes_cache:
            self.cache.write_new(first, feed.write_indices, call.sequence)

    @override
    def save_kernels(self) -> None:
        self._kernels.save()

    def describe(self) -> str:
        """The plan's layers as JSON, in the detail that TensorRT has for plans of this project."""
        inspector = self._engine.create_engine_inspector()
        return str(inspector.get_engine_information(self._trt.LayerInformationFormat.JSON))

    @override
    def close(self) -> None:
        """The order matters: contexts, their configurations, the engine, its runtime."""
        if "_engine" not in vars(self):
            return
        self.device.activate()
        self._contexts.clear()
        self._kernels.close()
        del self._engine, self._runtime

    def _new_execution(self, profile: int, fixed: bool) -> IExecutionContext:
        """A context that computes in the shared workspace. Raises BackendError."""
        if self._workspace is None:
            raise RuntimeError("allocate_cache comes before enqueue")
        config = self._kernels.runtime_config(self._trt, fixed)
        context = self._engine.create_execution_context(runtime_config=config)
        if context is None:
            raise BackendError(f"{self.config.backend.name} cannot run the plan: {self._log.reason()}")
        context.set_device_memory(self._workspace.address, self.workspace_bytes)
        if self.communicator is not None:
            if not hasattr(context, "set_communicator"):
                raise BackendError(f"{self.config.backend.name} {self._trt.__version__} has no ranks; 10.16 has them")
            self._require(context.set_communicator(self.communicator), "the communicator")
        if profile:
            done = context.set_optimization_profile_async(profile, self.device.stream)
            self._require(done, f"optimization profile {profile}")
            self.device.wait()
        return context

    def _bind_cache(self, context: IExecutionContext, first: int) -> None:
        """Bind the cache's rows from ``first`` on. Past and present have the same memory, unless those are new."""
        cache = bound_tensors(self.cache, self._cache_owner, first, 1)
        written = cache if self.config.writes_cache else self.cache.new()
        names = (*self.config.graph.past_names, *self.config.graph.present_names)
        bound = dict(zip(names, (*cache, *written), strict=True))
        if states := self.cache.states:
            bound |= states.bound(first)
        for name, memory in bound.items():
            self._require(context.set_tensor_address(name, memory.address), f"the address of {name}")

    def _require(self, done: bool, subject: str) -> None:
        """Raise BackendError unless ``done``. TensorRT returns False for errors, and its log holds the reason."""
        if not done:
            raise BackendError(f"{self.config.backend.name} refused {subject}: {self._log.reason()}")


def _check_engine(directory: Path, config: EngineConfig, engine: ICudaEngine) -> None:
    """Raise EngineDirError unless the plan has the contract's tensors and updates its caches as config.json says."""
    length = config.build_config.cache_length
    for cache in config.graph.cache_tensors:
        # A call for prompts begins at a later row. TensorRT needs addresses that are multiples of 256.
        if cache.heads * length * cache.head_dim * config.graph.cache_element.nbytes % 256:
            raise EngineDirError(f"{directory}: its rows of {length} positions are not aligned; build the engine again")
    for state in config.graph.states:
        if (size := 4 * math.prod(state.row_shape(config.graph.replays))) % 256:
            raise EngineDirError(
                f"{directory}: the {state.part} of its recurrent layer {state.layer} takes {size} bytes of a row; on a "
                "GPU it must be a multiple of 256, so this model runs on CPUs only"
            )
    past, present = config.graph.past_names, config.graph.present_names
    expected = {INPUT_IDS, WRITE_INDICES, LOGITS_INDICES, LOGITS, *past, *present}
    if config.graph.states:
        expected |= {STATE_INDICES, KEEP_INDICES}
        expected |= {name for state in config.graph.states for name in (state.past_name, state.present_name)}
    tensors = {engine.get_tensor_name(index) for index in range(engine.num_io_tensors)}
    if different := sorted(tensors ^ expected):
        name = different[0]
        fault = "has a tensor this release does not know" if name in tensors else "lacks a tensor of the contract"
        raise EngineDirError(f"{directory}: the plan {fault}: {name}; build the engine again")
    for before, after in zip(past, present, strict=True) if config.writes_cache else ():
        if engine.get_aliased_input_tensor(after) != before:
            raise EngineDirError(f"{directory}: the plan does not update {before} in place; build the engine again")
    profiles = config.build_config.profiles
    if engine.num_optimization_profiles != len(profiles):
        raise EngineDirError(
            f"{directory}: the plan has {engine.num_optimization_profiles} profiles, config.json lists "
            f"{len(profiles)}; build the engine again"
        )


def _log(trt: Any) -> Any:
    """A TensorRT logger that keeps the errors. Its ``reason`` returns the last one, in one line."""

    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: ILogger.Severity, message: str) -> None:
            if severity <= trt.ILogger.Severity.ERROR:
                self.errors.append(message)

        def reason(self) -> str:
            return " ".join(self.errors[-1].split()) if self.errors else "no reason given"

    return Log()
