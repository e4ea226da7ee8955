"""The compilers behind one small protocol: ONNX checkpoint in, engine files out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from specrun.devices.driver import why_no_gpu
from specrun.engine_dir.config import BackendInfo, BuildConfig, GraphInfo, Tensor
from specrun.errors import BackendError
from specrun.optional_packages import import_package


@dataclass(frozen=True)
class Compiled:
    """What a compiler wrote into the engine directory."""

    backend: BackendInfo
    graph: GraphInfo
    io: list[Tensor]
    files: list[str]
    notes: list[str]


class Compiler(Protocol):
    """Compiles a checkpoint's graph; raises BackendError when it cannot run here, BuildError when it refuses."""

    def __call__(
        self, checkpoint: Path, graph: GraphInfo, build: BuildConfig, output: Path, advance: Callable[[float], None]
    ) -> Compiled:
        """Compile the checkpoint directory's graph into ``output``; ``advance`` takes shares of 1."""


def choose(
    backend: str,
    device: str | None = None,
    compute_capabilities: tuple[int, ...] = (),
    timing_cache: Path | None = None,
) -> tuple[str, Compiler, str]:
    """The backend's name, its compiler and why it was chosen. Raises BackendError when it is not usable here.

    device: ``cpu``, ``cuda``, ``cuda:1`` or None. Only onnxruntime has a choice; None is the CPU there. With ``cuda``
    auto is never the CPU. Only tensorrt's engines are for the GPU that has a number.
    compute_capabilities: the GPUs that a plan of tensorrt_rtx is for, as in 89; only it has a choice.
    timing_cache: a file of tensorrt's.
    """
    kind, _, number = (device or "").partition(":")
    choice = _choose(backend, kind, int(number or 0), compute_capabilities, timing_cache)
    if timing_cache and choice[0] != "tensorrt":
        hint = (
            "; its kernels are compiled where they run, and specrun keeps them" if choice[0] == "tensorrt_rtx" else ""
        )
        raise BackendError(f"--timing_cache is supported only by tensorrt, not by {choice[0]}{hint}; leave it out")
    if compute_capabilities and choice[0] != "tensorrt_rtx":
        raise BackendError(
            f"--compute_capabilities is supported only by tensorrt_rtx, not by {choice[0]}; leave it out, or give "
            "--backend tensorrt_rtx"
        )
    if number and choice[0] != "tensorrt":
        raise BackendError(
            f"--device {device}: an engine of {choice[0]} is for no GPU in particular; give --device {kind} here, and "
            "the GPU's number to specrun"
        )
    return choice


def _choose(
    backend: str, device: str, gpu: int, capabilities: tuple[int, ...], timing_cache: Path | None
) -> tuple[str, Compiler, str]:
    import_package("onnx")  # Before our modules that import it, so that Ctrl-C does not break it off.
    from specbuild.compilers.cpu.compile import compile_graph
    from specbuild.compilers.cuda.compile import compile_layers
    from specbuild.compilers.ort_cuda.compile import copy_graph
    from specbuild.compilers.tensorrt import compile as tensorrt

    if backend == "onnxruntime" and device == "cuda":
        return backend, copy_graph, "asked for, on CUDA"
    if device == "cpu" and backend != "onnxruntime":
        if backend != "auto":
            raise BackendError(f"--backend {backend} --device cpu: its engines run on GPUs only")
        return "onnxruntime", compile_graph, "it is the backend for the CPU"
    if backend == "auto":
        problem = tensorrt.why_unusable("tensorrt", gpu)
        if problem is None:
            compiler = tensorrt.Tensorrt("tensorrt", gpu, (), timing_cache)
            return "tensorrt", compiler, "a usable NVIDIA GPU and tensorrt are here"
        reason = f"tensorrt is not usable ({problem})"
        if device == "cuda":
            return "onnxruntime", copy_graph, f"on CUDA, as asked for; {reason}"
        if why_no_gpu() is None:
            reason = (
                f"WARNING: built for the CPU, though this machine has an NVIDIA GPU: {reason}; for the GPU give "
                "--backend tensorrt_rtx or --device cuda"
            )
        return "onnxruntime", compile_graph, reason
    if backend == "onnxruntime":
        return backend, compile_graph, "asked for"
    if backend == "cuda":
        return backend, compile_layers, "asked for"
    problem = tensorrt.why_unusable(backend, gpu)
    if problem is not None:
        hint = "; --backend tensorrt_rtx compiles plans without a GPU" if backend == "tensorrt" else ""
        raise BackendError(f"--backend {backend}: {problem}{hint}")
    return backend, tensorrt.Tensorrt(backend, gpu, capabilities, timing_cache), "asked for"
