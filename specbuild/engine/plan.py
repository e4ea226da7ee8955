"""What follows from the options of ``specbuild engine``, before anything is built."""

from __future__ import annotations

import hashlib
import platform
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import onnx_ir as ir

from specbuild.artifacts.onnx_checkpoint import CheckpointConfig, open_checkpoint
from specbuild.artifacts.provenance import provenance, releases
from specbuild.compilers import Compiler, choose
from specbuild.engine.config import EngineOptions, plan_build
from specbuild.graph import ops as graphs
from specbuild.sharding.parts import CACHE
from specbuild.sharding.shard import shard
from specrun import cpu_operators
from specrun.devices.driver import compute_capability, gpu_name
from specrun.devices.processor import describe_processor
from specrun.engine_dir.cache_tensors import CacheTensor
from specrun.engine_dir.config import GRAPH_NAME, BuildConfig, Provenance
from specrun.engine_dir.layers import KERNELS
from specrun.errors import BackendError, BuildConfigError
from specrun.optional_packages import import_package

_MAKERS = ("onnx", "onnx_ir", "numpy")
_NOT_OF_THE_CONTENT = {"provenance", "max_logit_difference"}


@dataclass
class EnginePlan:
    """One engine, as it would be built."""

    options: EngineOptions
    checkpoint: CheckpointConfig
    build: BuildConfig
    backend: str
    device: Literal["cpu", "cuda"]
    compiler: Compiler
    reason: str
    """Reason for the choice of the backend."""
    notes: list[str]
    provenance: Provenance
    is_there: bool = False
    """The output directory holds it already."""

    def shard(self, rank: int) -> ir.Model:
        """The checkpoint's graph as one of several ranks computes it, without weights read. Raises BuildConfigError."""
        model = ir.load(self.options.checkpoint_dir / GRAPH_NAME)
        shard(model, rank, self.build.tp_size)
        return model

    @cached_property
    def rank_sizes(self) -> list[tuple[int, list[CacheTensor]]]:
        """Of each of several ranks: about how many bytes its weights are, and what it has of caches."""
        widened = graphs.HALF if self.device == "cpu" else ()  # Computed in float32.
        sizes = []
        for rank in range(self.build.tp_size):
            model = self.shard(rank)
            stored = [value.const_value for value in model.graph.initializers.values() if value.const_value is not None]
            weights = sum(tensor.nbytes * (2 if tensor.dtype in widened else 1) for tensor in stored)
            sizes.append((weights, caches_of(model)))
        return sizes


def caches_of(model: ir.Model) -> list[CacheTensor]:
    """What a graph has of keys and values."""
    inputs = [value for value in model.graph.inputs if str(value.name).startswith(CACHE)]
    shapes = [value.shape for value in inputs if value.shape is not None and value.name != f"{CACHE}features"]
    return [CacheTensor(heads=int(shape[1]), head_dim=int(shape[3])) for shape in shapes]  # type: ignore[arg-type]


def plan_engine(options: EngineOptions) -> EnginePlan:
    """Read the checkpoint and check the options. Raises SpecError, and ImportError where a package is missing."""
    checkpoint = open_checkpoint(options.checkpoint_dir)
    build, notes = plan_build(options, checkpoint)
    backend, compiler, reason = choose(
        options.backend, options.device, options.compute_capabilities, options.timing_cache
    )
    if options.multiple_profiles and backend in ("onnxruntime", "cuda"):
        raise BackendError(
            f"--multiple_profiles: an engine of {backend} has no profiles; leave it out, or give --backend tensorrt or "
            "tensorrt_rtx"
        )
    if options.kv_cache_dtype not in ("auto", "float32"):
        _check_cache(options, checkpoint, backend)
    device: Literal["cpu", "cuda"] = "cpu"
    if backend != "onnxruntime" or options.device == "cuda":
        device = "cuda"
    elif not cpu_operators.is_available():
        raise BackendError(
            "engines for the CPU need specrun's own operators, which were not compiled here: "
            f"{cpu_operators.HOW_TO_COMPILE}"
        )
    if options.tp_size > 1:
        _check_ranks(options, checkpoint, device)
    release = KERNELS if backend == "cuda" else import_package(backend).__version__
    versions = {backend: release, **releases(*_MAKERS)}
    if device == "cpu":
        versions["cpu_operators"] = str(cpu_operators.VERSION)
    built_from = provenance(
        "specbuild engine",
        str(options.checkpoint_dir),
        versions,
        machine=_machine(backend, device, options.device),
        options={
            "backend": backend,
            "device": device,
            "compute_capabilities": list(options.compute_capabilities),
            **build.model_dump(mode="json", exclude={"cache_length", "profiles"}),  # These follow from the others.
        },
        inputs=_inputs(checkpoint),
    )
    return EnginePlan(options, checkpoint, build, backend, device, compiler, reason, notes, built_from)


def _check_ranks(options: EngineOptions, checkpoint: CheckpointConfig, device: str) -> None:
    """Raises SpecError where a model cannot be divided between ranks."""
    if checkpoint.graph.is_head:
        raise BuildConfigError(
            f"--tp_size: {options.checkpoint_dir} is a draft head, which one rank computes; leave it out"
        )
    if device == "cuda" and options.backend in ("onnxruntime", "cuda"):
        raise BackendError(
            "--tp_size: only engines for CPUs and those of TensorRT are divided; give --backend tensorrt or "
            "tensorrt_rtx, or --backend onnxruntime without --device cuda"
        )


def _check_cache(options: EngineOptions, checkpoint: CheckpointConfig, backend: str) -> None:
    """Raises SpecError where keys and values cannot be packed."""
    given = f"--kv_cache_dtype {options.kv_cache_dtype}"
    if backend != "onnxruntime" or (options.device or "cpu") != "cpu":
        raise BackendError(
            f"{given}: is for engines of onnxruntime for the CPU; for TensorRT give it to 'specbuild convert'"
        )
    if checkpoint.graph.features is not None and options.kv_cache_dtype != "float16":
        raise BuildConfigError(f"{given}: of targets and their heads the cache is float16 or float32; leave it out")


def _inputs(checkpoint: CheckpointConfig) -> dict[str, str]:
    """Checksums of the checkpoint's files, as it lists them, and of what else its configuration says."""
    described = checkpoint.model_dump_json(exclude=_NOT_OF_THE_CONTENT)
    files = {name: info.sha256 for name, info in sorted(checkpoint.files.items())}
    return {**files, "config.json": hashlib.sha256(described.encode()).hexdigest()}


def _machine(backend: str, device: str, given: str | None) -> str:
    """What an engine is made for. Graphs for CUDA and plans of TensorRT-RTX are for no machine in particular."""
    kind = platform.machine()
    if device == "cpu":
        return f"{kind}, {describe_processor()}"
    if backend == "tensorrt":
        gpu = int((given or "").partition(":")[2] or 0)
        return f"{kind}, {gpu_name(gpu)}, compute capability {compute_capability(gpu)}"
    return kind
