"""A stand-in for TensorRT's runtime, for plans that are descriptions of ONNX graphs.

It has the classes and methods that ``specrun.gpu.trt`` uses, and holds their caller to TensorRT's rules, from
NVIDIA's documentation of ``ICudaEngine``, ``IExecutionContext`` and working with CUDA graphs. What breaks one is
refused and remembered. The numbers are ONNX Runtime's, computed in the stream.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import math
import weakref
from collections.abc import Callable
from enum import IntEnum
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from specbuild.artifacts.onnx_checkpoint import open_checkpoint
from specbuild.engine.config import plan_profiles
from specrun.engine_dir.config import (
    CONFIG_NAME,
    GRAPH_NAME,
    PLAN_NAME,
    EngineConfig,
    Profile,
    Tensor,
    describe_file,
    open_engine,
)
from specrun.engine_dir.contract import INPUT_IDS, KEEP_INDICES, LOGITS_INDICES, STATE_INDICES, WRITE_INDICES
from tests.gpu_simulator import collectives, gpus

__version__ = "11.99.simulated"
_ALIGNMENT = 256
_WORKSPACE = 1 << 16


def as_plan(
    source: Path,
    output: Path,
    checkpoint: Path | None = None,
    multiple_profiles: bool = False,
    with_plugins: bool = False,
) -> Path:
    """An engine directory of backend tensorrt, with the graph of an onnxruntime engine directory.

    checkpoint: its ONNX checkpoint, where the plan is to have the graph that TensorRT's compiler makes of it: one of an
    int8 cache, which the compiler leaves to the caller, or of recurrent layers, of which it makes loops, or with
    ``with_plugins`` calls of LinearAttention.
    """
    config = open_engine(source)
    build = config.build_config
    sizes = (build.max_batch_size, build.max_input_len, build.max_draft_len, build.gather_generation_logits)
    profiles = plan_profiles(*sizes, config.graph.round_len(build.max_draft_len), multiple_profiles)
    output.mkdir(parents=True)
    graph = next(name for name in config.files if name.endswith(".onnx"))
    path = source / graph
    if checkpoint:
        path = _compile(checkpoint, output / "plan.onnx", config, with_plugins)
        kept = open_checkpoint(checkpoint).graph.kv_cache_dtype
        config = config.model_copy(update={"graph": config.graph.model_copy(update={"kv_cache_dtype": kept})})
    io = [_as_trt_has_it(config, tensor) for tensor in config.io]
    plan = {
        "graph": str(path.resolve()),
        "io": [tensor.model_dump() for tensor in io],
        "profiles": [profile.model_dump() for profile in profiles],
        "cache_length": build.cache_length,
    }
    (output / PLAN_NAME).write_text(json.dumps(plan))
    files = {PLAN_NAME: describe_file(output / PLAN_NAME)}
    for name in set(config.files) - {graph}:
        if not name.startswith(graph):
            (output / name).write_bytes((source / name).read_bytes())
            files[name] = config.files[name]
    changed = {
        "graph": config.graph,
        "backend": config.backend.model_copy(
            update={"name": "tensorrt", "version": __version__, "device": "cuda", "compute_capabilities": ["9.0"]}
        ),
        "build_config": build.model_copy(update={"profiles": profiles, "multiple_profiles": multiple_profiles}),
        "io": io,
        "files": files,
    }
    (output / CONFIG_NAME).write_text(config.model_copy(update=changed).model_dump_json(indent=2) + "\n")
    return output


def as_rank_plans(source: Path, output: Path) -> Path:
    """An engine directory of backend tensorrt, with the graphs of an onnxruntime engine directory of several ranks."""
    config = open_engine(source)
    build, files = config.build_config, {}
    profiles = plan_profiles(build.max_batch_size, build.max_input_len, build.max_draft_len, False)
    output.mkdir(parents=True)
    for rank, caches in enumerate(config.graph.ranks):
        heads = dict(zip([*config.graph.past_names, *config.graph.present_names], [*caches, *caches], strict=True))
        io = [
            tensor.model_copy(update={"shape": [tensor.shape[0], heads[tensor.name].heads, *tensor.shape[2:]]})
            if tensor.name in heads
            else tensor
            for tensor in config.io
        ]
        plan = {
            "graph": str(_with_collectives(source / f"rank{rank}" / GRAPH_NAME, output / f"rank{rank}.onnx")),
            "io": [tensor.model_dump() for tensor in io],
            "profiles": [profile.model_dump() for profile in profiles],
            "cache_length": build.cache_length,
        }
        name = f"rank{rank}.engine"
        (output / name).write_text(json.dumps(plan))
        files[name] = describe_file(output / name)
    for name, info in config.files.items():
        if "/" not in name:
            (output / name).write_bytes((source / name).read_bytes())
            files[name] = info
    backend = {"name": "tensorrt", "version": __version__, "device": "cuda", "compute_capabilities": ["9.0"]}
    changed = {
        "backend": config.backend.model_copy(update=backend),
        "build_config": build.model_copy(update={"profiles": profiles}),
        "files": files,
    }
    (output / CONFIG_NAME).write_text(config.model_copy(update=changed).model_dump_json(indent=2) + "\n")
    return output


def _with_collectives(graph: Path, path: Path) -> Path:
    """Save a graph for the CPU with TensorRT's nodes where it has specrun's collectives."""
    model = _split(graph)
    onnx.load_external_data_for_model(model, str(graph.parent))
    for node in model.graph.node:
        if node.op_type in ("AllReduce", "AllGather"):
            ranks = next(attribute.i for attribute in node.attribute if attribute.name == "ranks")
            kind = ("ALL_REDUCE", "SUM") if node.op_type == "AllReduce" else ("ALL_GATHER", "NONE")
            settings = {"collective_operation": kind[0], "reduce_op": kind[1], "root": -1, "nb_rank": ranks}
            inputs, outputs = list(node.input), list(node.output)
            node.CopyFrom(onnx.helper.make_node("DistCollective", inputs, outputs, domain="tensorrt", **settings))
    onnx.save(model, path)
    return path.resolve()


def _split(path: Path) -> onnx.ModelProto:
    """A CPU engine's graph with a node for each operator, and without its weights."""
    import onnx_ir as ir  # It takes seconds to import, and some tests start processes that have no use for it.

    from specbuild.compilers.cpu.fused_layers import split_layers

    model = ir.load(path)
    split_layers(model.graph)
    return ir.to_proto(model)


def _compile(checkpoint: Path, path: Path, config: EngineConfig, with_plugins: bool) -> Path:
    """Save the graph of a checkpoint as TensorRT's compiler would change it."""
    import onnx_ir as ir  # It takes seconds to import, and some tests start processes that have no use for it.

    from specbuild.graph.kv_cache_qdq import leave_writing_to_caller
    from specbuild.graph.ops import pin_cache_length
    from specbuild.graph.plain_attention import write_out_attention
    from specbuild.graph.recurrent import Operators, expand

    model, length = ir.load(checkpoint / GRAPH_NAME), config.build_config.cache_length
    if config.graph.states:
        operators = Operators.ONNX_RUNTIME if with_plugins else Operators.LOOP
        expand(model, config.graph.states, config.graph.replays, operators)
        if not with_plugins:
            write_out_attention(model)
    pin_cache_length(model, length)
    leave_writing_to_caller(model, length)
    ir.save(model, path, external_data=f"{path.name}.data")
    return path


def _as_trt_has_it(config: EngineConfig, tensor: Tensor) -> Tensor:
    """A tensor of an engine for the CPU as a plan has it: keys and values alone are updated in place, if at all."""
    if (kept := config.graph.kv_cache_dtype) and tensor.name in config.graph.past_names:
        return tensor.model_copy(update={"dtype": kept})
    if kept and tensor.aliases in config.graph.past_names:
        shape = ["batch", tensor.shape[1], "sequence", tensor.shape[3]]
        return tensor.model_copy(update={"aliases": None, "shape": shape, "dtype": kept})
    states = {name: state for state in config.graph.states for name in (state.past_name, state.present_name)}
    if tensor.name in states:
        shape = ["batch", *states[tensor.name].row_shape(config.graph.replays)]
        return tensor.model_copy(update={"aliases": None, "shape": shape})
    return tensor


class Flag:
    """Something that becomes true."""

    def __init__(self, value: bool) -> None:
        self.value = value

    def set(self) -> None:
        self.value = True


class ILogger:
    """Errors go to the user's subclass."""

    class Severity(IntEnum):
        INTERNAL_ERROR = 0
        ERROR = 1
        WARNING = 2

    def log(self, severity: Severity, message: str) -> None:
        """For a subclass."""


class ExecutionContextAllocationStrategy(IntEnum):
    STATIC = 0
    ON_PROFILE_CHANGE = 1
    USER_MANAGED = 2


class RuntimeConfig:
    """How contexts are made."""

    def __init__(self) -> None:
        self.contexts: weakref.WeakSet[ExecutionContext] = weakref.WeakSet()
        self.strategy = ExecutionContextAllocationStrategy.STATIC
        _outlives(self, self.contexts, "a runtime configuration", "a context")

    def set_execution_context_allocation_strategy(self, strategy: ExecutionContextAllocationStrategy) -> None:
        self.strategy = strategy


class Runtime:
    """Loads plans."""

    def __init__(self, log: ILogger) -> None:
        self._log = log
        self._engines: weakref.WeakSet[CudaEngine] = weakref.WeakSet()
        _outlives(self, self._engines, "a runtime", "an engine")

    def deserialize_cuda_engine(self, plan: bytes) -> CudaEngine | None:
        try:
            engine = CudaEngine(json.loads(plan), self._log)
        except ValueError as error:
            self._log.log(ILogger.Severity.ERROR, f"not a plan: {error}")
            return None
        self._engines.add(engine)
        return engine


class LayerInformationFormat(IntEnum):
    ONELINE = 0
    JSON = 1


class EngineInspector:
    """Says what a plan consists of."""

    def __init__(self, engine: CudaEngine) -> None:
        self._engine = engine

    def get_engine_information(self, form: LayerInformationFormat) -> str:
        names = [f"{node.op_type} {node.name}" for node in _split(self._engine.graph).graph.node]
        return json.dumps({"Layers": names, "Bindings": list(self._engine.tensors)})


class CudaEngine:
    """A plan on the GPU that was current when it was loaded."""

    def __init__(self, plan: dict[str, Any], log: ILogger) -> None:
        self.device = int(gpus.library().gpu_current_device())
        self.tensors: dict[str, Tensor] = {tensor["name"]: Tensor.model_validate(tensor) for tensor in plan["io"]}
        self.profiles = [Profile.model_validate(profile) for profile in plan["profiles"]]
        self.cache_length = int(plan["cache_length"])
        self.log = log
        self.pieces = list(collectives.cut(plan["graph"]))
        self.graph = Path(plan["graph"])
        self.workspaces: dict[int, int] = {}
        """The stream that each workspace is used on."""
        self._contexts: weakref.WeakSet[ExecutionContext] = weakref.WeakSet()
        _outlives(self, self._contexts, "an engine", "a context")

    device_memory_size_v2 = _WORKSPACE

    @property
    def num_io_tensors(self) -> int:
        return len(self.tensors)

    @property
    def num_optimization_profiles(self) -> int:
        return len(self.profiles)

    def get_tensor_name(self, index: int) -> str:
        return list(self.tensors)[index]

    def get_aliased_input_tensor(self, name: str) -> str | None:
        return self.tensors[name].aliases

    def create_engine_inspector(self) -> EngineInspector:
        return EngineInspector(self)

    def create_runtime_config(self) -> RuntimeConfig:
        return RuntimeConfig()

    def create_execution_context(self, runtime_config: RuntimeConfig) -> ExecutionContext:
        context = ExecutionContext(self, runtime_config.strategy)
        self._contexts.add(context)
        runtime_config.contexts.add(context)
        return context


class ExecutionContext:
    """Shapes, addresses and a profile."""

    def __init__(self, engine: CudaEngine, strategy: ExecutionContextAllocationStrategy) -> None:
        # As in C++, it does not keep the engine alive.
        self._engine = weakref.ref(engine)
        self._log = engine.log
        self._needs_workspace = strategy == ExecutionContextAllocationStrategy.USER_MANAGED
        self._workspace: tuple[int, int] | None = None
        self._profile = 0
        self._switched = Flag(True)
        """Whether a switch of profiles, which waits in a stream, is done."""
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._warm: dict[str, tuple[int, ...]] | None = None
        """The shapes of the last call outside of a capture."""
        self._communicator: collectives.Communicator | None = None

    def set_device_memory(self, memory: int, size: int) -> None:
        self._workspace = (memory, size)

    def set_communicator(self, communicator: object) -> bool:
        self._communicator = collectives.join(communicator)
        if self._communicator is None:
            return self._refuse("a communicator that the other ranks did not set at the same time")
        return True

    def set_optimization_profile_async(self, profile: int, stream: int) -> bool:
        if gpus.library().gpu_is_captured(ctypes.c_void_p(stream)):
            return self._refuse("a switch of profiles in a capture")
        if not 0 <= profile < self._own().num_optimization_profiles:
            return self._refuse(f"profile {profile}")
        self._profile, self._switched, self._shapes, self._warm = profile, Flag(False), {}, None
        _queue(stream, self._switched.set)
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        if not self._switched.value:
            return self._refuse("a shape before the switch of profiles was waited for")
        limits = self._limits(name)
        if len(shape) != len(limits) or any(
            not low <= size <= high for size, (low, high) in zip(shape, limits, strict=False)
        ):
            return self._refuse(f"the shape {shape} of {name}, which is not within {limits} of its profile")
        if self._shapes.get(name) != shape:
            self._warm = None
        self._shapes[name] = shape
        return True

    def set_tensor_address(self, name: str, address: int) -> bool:
        if name not in self._own().tensors:
            return self._refuse(f"the name {name}")
        if address % _ALIGNMENT:
            return self._refuse(f"the address of {name}, which is not a multiple of {_ALIGNMENT}")
        self._addresses[name] = address
        return True

    def execute_async_v3(self, stream: int) -> bool:
        engine = self._own()
        captured = bool(gpus.library().gpu_is_captured(ctypes.c_void_p(stream)))
        if reason := self._why_not(engine, stream, captured):
            return self._refuse(reason)
        shapes = {name: self._shape(tensor) for name, tensor in engine.tensors.items()}
        arrays = {
            name: _memory(self._addresses[name], shape, engine.tensors[name].dtype) for name, shape in shapes.items()
        }
        if not captured:
            self._warm = dict(self._shapes)
        values: dict[str, collectives.Array] = {}
        for number, piece in enumerate(engine.pieces):
            _queue(stream, partial(_run, self._engine, number, arrays, values))
            if piece.collective and self._communicator:
                self._communicator.stream = stream
                _queue(stream, partial(self._communicator.meet, piece.collective, values))
        return True

    def _why_not(self, engine: CudaEngine, stream: int, captured: bool) -> str | None:
        """The rule that a call would break."""
        device = int(gpus.library().gpu_stream_device(ctypes.c_void_p(stream)))
        if device != engine.device or int(gpus.library().gpu_current_device()) != engine.device:
            return "a call while another GPU is current, or on its stream"
        if len(engine.pieces) > 1 and self._communicator is None:
            return "a call of an engine with collectives without a communicator"
        if not self._switched.value:
            return "a call before the switch of profiles was waited for"
        if captured and self._warm != self._shapes:
            return "the capture of a shape that this context has not run before"
        if self._needs_workspace:
            address, size = self._workspace or (0, 0)
            if size < engine.device_memory_size_v2 or _room(address, device) < size or address % _ALIGNMENT:
                return "its workspace, which is missing, too small or not aligned"
            if engine.workspaces.setdefault(address, stream) != stream:
                return "a workspace that another stream uses"
        for name, tensor in engine.tensors.items():
            if tensor.kind == "input" and name not in self._shapes:
                return f"a call without the shape of {name}"
            if name not in self._addresses:
                return f"a call without the address of {name}"
            size = math.prod(self._shape(tensor)) * np.dtype(tensor.dtype).itemsize
            if _room(self._addresses[name], device) < size:
                return f"{name}, of {size} bytes, which end behind their allocation or belong to another GPU"
            if tensor.aliases and self._addresses[name] != self._addresses[tensor.aliases]:
                return f"{name}, which must be where {tensor.aliases} is"
        return self._what_overlaps(engine)

    def _what_overlaps(self, engine: CudaEngine) -> str | None:
        """Outputs in the memory of inputs, other than those that the plan updates in place."""
        sizes = {
            name: math.prod(self._shape(tensor)) * np.dtype(tensor.dtype).itemsize
            for name, tensor in engine.tensors.items()
        }
        outputs = [tensor for tensor in engine.tensors.values() if tensor.kind == "output"]
        inputs = [tensor.name for tensor in engine.tensors.values() if tensor.kind == "input"]
        for output, name in itertools.product(outputs, inputs):
            distance = self._addresses[name] - self._addresses[output.name]
            if output.aliases != name and -sizes[name] < distance < sizes[output.name]:
                return f"{output.name}, which lies in the memory of {name}"
        return None

    def _shape(self, tensor: Tensor) -> tuple[int, ...]:
        """In the next call."""
        if tensor.kind == "input":
            return self._shapes[tensor.name]
        if tensor.aliases:
            return self._shapes[tensor.aliases]
        ids, indices = self._shapes[INPUT_IDS], self._shapes[LOGITS_INDICES]
        batch, sequence, kept = ids[0], ids[1], indices[1]
        sizes = {"batch": batch, "sequence": sequence, "logits": kept}
        return tuple(size if isinstance(size, int) else sizes[size] for size in tensor.shape)

    def _limits(self, name: str) -> list[tuple[int, int]]:
        """The smallest and largest size of each dimension."""
        engine = self._own()
        profile, cache = engine.profiles[self._profile], engine.tensors[name].shape
        sizes = {
            INPUT_IDS: [profile.batch, profile.sequence],
            WRITE_INDICES: [profile.batch],
            LOGITS_INDICES: [profile.batch, profile.logits],
            STATE_INDICES: [profile.batch],
            KEEP_INDICES: [profile.batch],
        }
        if name in sizes:
            return [(size[0], size[2]) for size in sizes[name]]
        fixed = [engine.cache_length if isinstance(size, str) else size for size in cache[1:]]
        return [(profile.batch[0], profile.batch[2]), *((size, size) for size in fixed)]

    def _own(self) -> CudaEngine:
        engine = self._engine()
        if engine is None:
            gpus.violate("IExecutionContext", "used after its engine")
            raise RuntimeError("the engine of this context is gone")
        return engine

    def _refuse(self, what: str) -> bool:
        gpus.violate("IExecutionContext", f"was given {what}")
        self._log.log(ILogger.Severity.ERROR, f"refused {what}")
        return False


def _outlives(owner: Any, users: weakref.WeakSet[Any], what: str, whom: str) -> None:
    """An owner that goes before its users broke a rule."""

    def gone() -> None:
        if len(users):
            gpus.violate("TensorRT", f"{what} went before {whom} that was made from it")

    weakref.finalize(owner, gone).atexit = False


def _room(address: int, device: int) -> int:
    return int(gpus.library().gpu_room(ctypes.c_uint64(address), device))


def _memory(address: int, shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
    """Device memory as an array. It may be gone when it is looked at; the driver says so then."""
    kind = np.dtype(dtype)
    raw = (ctypes.c_uint8 * (math.prod(shape) * kind.itemsize)).from_address(address)
    return np.frombuffer(memoryview(raw), kind).reshape(shape)


_HOST_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_queued: list[Any] = []
"""A graph may run its functions again at any time, so they are kept."""


def _queue(stream: int, work: Callable[[], None]) -> None:
    """Run ``work`` in the stream."""

    def run(_: int | None) -> None:
        try:
            work()
        except Exception as error:
            gpus.violate("TensorRT", f"failed while it ran: {error}")

    _queued.append(_HOST_FUNCTION(run))
    gpus.library().gpu_queue_engine(ctypes.c_void_p(stream), _queued[-1])


def _run(
    running: weakref.ref[CudaEngine],
    number: int,
    arrays: dict[str, collectives.Array],
    values: dict[str, collectives.Array],
) -> None:
    """A piece of a forward pass, nearly always the whole. arrays: the engine's tensors; values: all that is computed.

    TensorRT does not look at the contents of its inputs; the graph contract does.
    """
    engine = running()
    if engine is None:
        gpus.violate("enqueueV3", "the engine went before its work ran")
        return
    width = arrays[INPUT_IDS].shape[1]
    if (arrays[WRITE_INDICES] < 0).any() or (arrays[WRITE_INDICES] + width > engine.cache_length).any():
        gpus.violate("enqueueV3", f"{width} tokens at {arrays[WRITE_INDICES].tolist()} of {engine.cache_length}")
        return
    for address in {array.ctypes.data for array in arrays.values()}:
        if not _room(address, engine.device):
            gpus.violate("enqueueV3", "a tensor's memory was freed before the work ran")
            return
    if number == 0:
        values.update(arrays)
    engine.pieces[number].run(values)
    if number == len(engine.pieces) - 1:
        for name, tensor in engine.tensors.items():
            if tensor.kind == "output":
                arrays[name][...] = values[name]
        values.clear()
