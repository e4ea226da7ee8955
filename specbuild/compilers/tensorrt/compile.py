"""TensorRT and TensorRT-RTX: one module, two import names.

TensorRT-RTX's builder compiles without a GPU, for the compute capabilities it lists; TensorRT's needs its GPU.
Networks are strongly typed: the ONNX graph's dtypes are the engine's.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import onnx_ir as ir

from specbuild.compilers import Compiled
from specbuild.compilers.tensorrt.formats import (
    make_names_unique,
    move_zero_points,
    narrow_float4_scales,
    round_float4_inputs,
    round_token_inputs,
    turn_negative_scales,
)
from specbuild.compilers.tensorrt.progress import progress_monitor
from specbuild.compilers.tensorrt.timing_cache import load_timings, save_timings
from specbuild.graph import ops as graphs
from specbuild.graph.kv_cache_qdq import leave_writing_to_caller
from specbuild.graph.plain_attention import write_out_attention
from specbuild.graph.recurrent import Operators, expand
from specbuild.progress import deferred_signals
from specrun.devices import rtx_plugins
from specrun.devices.driver import compute_capability, use_gpu, why_no_gpu
from specrun.engine_dir.config import GRAPH_NAME, PLAN_NAME, BackendInfo, BuildConfig, GraphInfo, Profile, Tensor
from specrun.engine_dir.contract import INPUT_IDS, KEEP_INDICES, LOGITS_INDICES, STATE_INDICES, WRITE_INDICES
from specrun.engine_dir.dtypes import DTYPES
from specrun.errors import BackendError, BuildError
from specrun.optional_packages import how_to_install, import_package

if TYPE_CHECKING:
    from tensorrt import (
        Builder,
        Dims,
        IHostMemory,
        ILogger,
        INetworkDefinition,
        IOptimizationProfile,
        ITensor,
        OnnxParser,
    )


def why_unusable(name: str, gpu: int = 0) -> str | None:
    """Why the builder ``name`` cannot run on this machine, for ``gpu`` if it needs one; None: it can."""
    try:
        trt = import_package(name)
    except ImportError:
        return f"{name} is not installed: {how_to_install(name)}"
    except Exception as error:  # A broken installation may raise anything.
        return f"{name} does not load ({error})"
    if name == "tensorrt" and (reason := why_no_gpu(gpu)):
        return f"it needs an NVIDIA GPU: {reason}"
    missing = [part for part in ("Builder", "OnnxParser", "IKVCacheUpdateLayer") if not hasattr(trt, part)]
    if missing:
        return f"{name} {trt.__version__} is too old: it has no {missing[0]}; 10.15 or newer is needed"
    return None


class Tensorrt:
    """The compiler for import name ``tensorrt`` or ``tensorrt_rtx``."""

    def __init__(
        self, name: str, gpu: int = 0, capabilities: tuple[int, ...] = (), timing_cache: Path | None = None
    ) -> None:
        """gpu: number of the GPU for TensorRT's plans. capabilities: for TensorRT-RTX's plans; empty: all that can.

        timing_cache: TensorRT's file, which is read and written.
        """
        self.name: Any = name
        self.gpu = gpu
        self.capabilities = capabilities
        self.timing_cache = timing_cache

    def __call__(
        self, checkpoint: Path, graph: GraphInfo, build: BuildConfig, output: Path, advance: Callable[[float], None]
    ) -> Compiled:
        """Compile a plan, as a ``Compiler``."""
        trt = import_package(self.name)
        if self.name == "tensorrt":
            use_gpu(self.gpu)  # A builder compiles for the GPU of the thread that creates it.
        model = ir.load(checkpoint / GRAPH_NAME)
        capabilities = _capabilities(trt, model, self.capabilities)
        weights = checkpoint
        notes = list[str]()
        turned = turn_negative_scales(model)
        if moved := move_zero_points(model):
            notes.append(f"{moved} products have a second product, for minima; int4_sym has none")
        if turned + moved + round_token_inputs(model):
            model, weights = graphs.write_recoded(model, output), output
        round_float4_inputs(model)
        narrow_float4_scales(model)
        plugins = ""
        if graph.states:
            graph = graph.with_replays(build.max_draft_len)
            plugins, note = _write_recurrent_layers(self.name, model, graph)
            notes.append(note)
        graphs.pin_cache_length(model, build.cache_length)
        leave_writing_to_caller(model, build.cache_length)  # TensorRT updates no 8-bit cache in place.
        make_names_unique(model)
        if graph.dtype == "float32":  # TensorRT has no fused float32 attention.
            graphs.mark_decomposable(model)
        run = partial(_build, trt, weights, model, graph, build, advance, capabilities, self.timing_cache)
        built = run()
        if built.plan is None and graph.dtype != "float32" and graphs.mark_decomposable(model):
            # A refusal comes early: with TensorRT-RTX 1.7 after 0.3 s of 1.9 s (2 layers), 3.1 s of 8.5 s (16 layers).
            built = run()
            widths = ", ".join(str(width) for width in sorted({cache.head_dim for cache in graph.caches}))
            notes.append(
                f"TensorRT has no fused attention kernel for {graph.dtype} and heads of {widths}: it takes attention "
                "apart, which, it says, may be slower"
            )
        log = built.log
        if built.plan is None:
            raise BuildError(f"{checkpoint}: {self.name} {trt.__version__} refused the graph: {log.reason()}")
        if unused := log.unused():
            raise BuildError(
                f"{checkpoint}: {self.name} ignores the input {unused}; the engine would compute something else"
            )
        graphs.remove_recoded(output)
        (output / PLAN_NAME).write_bytes(built.plan)
        return Compiled(
            backend=BackendInfo(
                name=self.name,
                version=trt.__version__,
                device="cuda",
                machine=platform.machine(),
                compute_capabilities=_capability_names(capabilities, self.gpu),
                plugins=plugins,
            ),
            graph=graph,
            io=built.io,
            files=[PLAN_NAME],
            notes=[*notes, *log.notes()],
        )


def _write_recurrent_layers(name: str, model: ir.Model, graph: GraphInfo) -> tuple[str, str]:
    """Write recurrent layers in operators of the compiler. Returns the version of plug-ins that they need, and a note.

    Where TensorRT-RTX's plug-ins load, a layer is two calls of LinearAttention: one for the outputs of all tokens, one
    for the state after those that are kept. Otherwise it is a loop.
    """
    why_not = "it has no operator for them"
    if name == "tensorrt_rtx":
        try:
            rtx_plugins.load_for_parser()
        except BackendError as error:
            why_not = str(error)
        else:
            version = rtx_plugins.installed_version() or ""
            expand(model, graph.states, graph.replays, Operators.ONNX_RUNTIME)
            return version, f"recurrent layers by TensorRT-RTX's plug-ins {version}, which have not run on a GPU yet"
    expand(model, graph.states, graph.replays)
    write_out_attention(model)  # TensorRT-RTX 1.7 crashes where a loop follows an Attention.
    return "", f"recurrent layers read token after token, in a loop whose speed is not known ({why_not})"


class _Built(NamedTuple):
    """Result of one run of the builder; ``plan`` is None where it refused."""

    plan: IHostMemory | None
    log: Any
    io: list[Tensor]


def _build(
    trt: Any,
    weights: Path,
    model: ir.Model,
    graph: GraphInfo,
    build: BuildConfig,
    advance: Callable[[float], None],
    capabilities: list[int],
    timing_cache: Path | None,
) -> _Built:
    """Run the builder on TensorRT's copy of the graph. Raises BuildError where its parser refuses."""
    log = _log(trt)
    builder = trt.Builder(log)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser: OnnxParser = trt.OnnxParser(network, log)
    # The path is that of any file beside the weights; the graph itself is parsed from memory.
    if not parser.parse(graphs.to_bytes(model), str(weights / GRAPH_NAME)):
        errors = [parser.get_error(i) for i in range(parser.num_errors)]
        reasons = "; ".join(f"{error.node_operator()} ({error.node_name()}): {error.desc()}" for error in errors)
        raise BuildError(f"{weights}: TensorRT's ONNX parser refused the graph: {reasons}")
    advance(0.1)
    io = _check_network(trt, network, graph)
    config = builder.create_builder_config()
    for profile in build.profiles:
        config.add_optimization_profile(_profile(builder, network, profile))
    if hasattr(config, "num_compute_capabilities"):
        config.num_compute_capabilities = len(capabilities)
        for index, number in enumerate(capabilities):
            config.set_compute_capability(trt.ComputeCapability.__members__[f"SM{number}"], index)
    config.clear_flag(trt.BuilderFlag.TF32)  # float32 means float32.
    if hasattr(trt.BuilderFlag, "REQUIRE_USER_ALLOCATION"):
        config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)  # Or the plan cannot be part of a CUDA graph.
    cache = load_timings(config, timing_cache, log) if timing_cache else None
    # The builder calls Python from C++. It prints an exception from there, and goes on building.
    with deferred_signals(second_ends=False) as interrupted:
        config.progress_monitor = progress_monitor(trt, advance, interrupted)
        plan = builder.build_serialized_network(network, config)
        if interrupted.is_set():
            raise KeyboardInterrupt
    if timing_cache and cache and plan is not None:
        save_timings(config, cache, timing_cache, log)
    return _Built(plan, log, io)


def _log(trt: Any) -> Any:
    """A TensorRT logger that keeps errors and warnings. ``notes`` drops warnings that do not matter."""

    class Log(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []
            self.warnings: list[str] = []
            self.problems: list[str] = []

        def log(self, severity: ILogger.Severity, message: str) -> None:
            if severity in (trt.ILogger.ERROR, trt.ILogger.INTERNAL_ERROR):
                self.errors.append(message)
            elif severity == trt.ILogger.WARNING:
                self.warnings.append(message)
            if severity <= trt.ILogger.WARNING:
                self.problems.append(message)

        def reason(self) -> str:
            return self.errors[0] if self.errors else "no reason given"

        def unused(self) -> str | None:
            matching = [text for text in self.warnings if "unused" in text.lower() and "input" in text.lower()]
            return matching[0] if matching else None

        def notes(self) -> list[str]:
            return [text for text in self.warnings if "Int64 binding" not in text]

    return Log()


def _check_network(trt: Any, network: INetworkDefinition, graph: GraphInfo) -> list[Tensor]:
    """The network's inputs and outputs, each cache output with the input whose memory it shares.

    Raises BuildError where a contract tensor is missing or a cache is not updated in place.
    """
    aliases = {}
    for index in range(network.num_layers):
        layer = network.get_layer(index)
        if layer.type == trt.LayerType.KV_CACHE_UPDATE:
            aliases[layer.get_output(0).name] = layer.get_input(0).name
    past, present = graph.past_names, graph.present_names
    in_place = dict(zip(present, past, strict=True)) if graph.kv_cache_dtype is None else {}
    if aliases != in_place:
        raise BuildError(
            f"TensorRT does not update the cache in place: expected {len(past)} aliased tensors, found {len(aliases)}"
        )
    inputs = [network.get_input(i) for i in range(network.num_inputs)]
    outputs = [network.get_output(i) for i in range(network.num_outputs)]
    expected = {INPUT_IDS, WRITE_INDICES, LOGITS_INDICES, *past}
    if graph.states:
        expected |= {STATE_INDICES, KEEP_INDICES, *(state.past_name for state in graph.states)}
    if different := expected ^ {tensor.name for tensor in inputs}:
        raise BuildError(f"TensorRT's network and the graph contract differ in the input {sorted(different)[0]!r}")
    return [
        Tensor(
            name=tensor.name,
            kind="input" if tensor.is_network_input else "output",
            dtype=_dtype(tensor),
            shape=_shape(tensor.name, tensor.shape, tensor.name in present and tensor.name not in aliases),
            aliases=aliases.get(tensor.name),
        )
        for tensor in (*inputs, *outputs)
    ]


def _dtype(tensor: ITensor) -> str:
    name = str(tensor.dtype).rpartition(".")[2].lower()
    return {dtype.tensorrt: dtype.name for dtype in DTYPES.values()}.get(name, name)


_VARIABLE = {
    INPUT_IDS: (graphs.BATCH, graphs.SEQUENCE),
    WRITE_INDICES: (graphs.BATCH,),
    LOGITS_INDICES: (graphs.BATCH, graphs.KEPT),
    "logits": (graphs.BATCH, graphs.KEPT),
}


def _shape(name: str, dims: Dims, new_positions: bool = False) -> list[int | str]:
    names = (graphs.BATCH, "", graphs.SEQUENCE) if new_positions else _VARIABLE.get(name, (graphs.BATCH,))
    return [names[i] if dim < 0 and i < len(names) else int(dim) for i, dim in enumerate(dims)]


def _profile(builder: Builder, network: INetworkDefinition, sizes: Profile) -> IOptimizationProfile:
    profile = builder.create_optimization_profile()
    for index in range(network.num_inputs):
        tensor = network.get_input(index)
        by_name = {INPUT_IDS: sizes.sequence, LOGITS_INDICES: sizes.logits}
        fixed = [[size] * 3 for size in tuple(tensor.shape)[1:]]
        axes = [sizes.batch, by_name[tensor.name]] if tensor.name in by_name else [sizes.batch, *fixed]
        profile.set_shape(tensor.name, *zip(*axes, strict=True))
    return profile


def _capability_names(capabilities: list[int], gpu: int) -> list[str]:
    """Compute capabilities of a plan, such as 8.9: the chosen ones, or that of ``gpu``."""
    return [f"{number // 10}.{number % 10}" for number in capabilities] or [compute_capability(gpu)]


_FIRST_CAPABILITY = {
    ir.DataType.BFLOAT16: 80,
    ir.DataType.INT4: 80,
    ir.DataType.UINT4: 80,
    ir.DataType.FLOAT8E4M3FN: 89,
    ir.DataType.FLOAT4E2M1: 120,
}
"""First compute capability, times 10, with a type; see quantization in docs/gpu.md."""
_DEFAULT_FROM = 80
"""Oldest compute capability, times 10, of plans without an explicit choice."""


def _capabilities(trt: Any, model: ir.Model, requested: tuple[int, ...]) -> list[int]:
    """Compute capabilities to compile for: the requested ones, or all that take the graph. [] without a choice.

    Raises BuildError where a requested one is unknown or does not take the graph.
    """
    if not hasattr(trt, "ComputeCapability"):
        return []
    supported = sorted(int(name[2:]) for name in trt.ComputeCapability.__members__ if name.startswith("SM"))
    types = {value.dtype for value in model.graph.initializers.values() if value.dtype in _FIRST_CAPABILITY}
    form = max(types, key=lambda kind: _FIRST_CAPABILITY[kind], default=None)
    first = _FIRST_CAPABILITY[form] if form else 0
    for number in requested:
        if number not in supported:
            names = ", ".join(map(str, supported))
            raise BuildError(f"--compute_capabilities {number}: TensorRT-RTX {trt.__version__} knows {names}")
        if form and number < first:
            raise BuildError(
                f"--compute_capabilities {number}: weights or the cache are {form.name.lower()}, which GPUs have from "
                f"{first} on"
            )
    return list(requested) or [number for number in supported if number >= max(first, _DEFAULT_FROM)]
