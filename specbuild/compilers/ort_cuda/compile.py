"""Copies the checkpoint's graph for ONNX Runtime on CUDA, which optimizes it on the GPU when it loads it.

It drops causal masks, with which ONNX Runtime would not use Flash attention, and rewrites formats that its kernels do
not support or that cannot be captured.
"""

from __future__ import annotations

import platform
import shutil
from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir

from specbuild.compilers import Compiled
from specbuild.compilers.graph_io import describe_io
from specbuild.compilers.ort_cuda import formats
from specbuild.graph import ops as graphs
from specbuild.graph.causal_mask import drop_causal_masks
from specbuild.graph.untie import untie_heads
from specrun.backends.ort import session_options
from specrun.engine_dir.config import GRAPH_NAME, WEIGHTS_NAME, BackendInfo, BuildConfig, GraphInfo
from specrun.errors import BuildError


def copy_graph(
    checkpoint: Path, graph: GraphInfo, build: BuildConfig, output: Path, advance: Callable[[float], None]
) -> Compiled:
    """The ``Compiler`` for ONNX Runtime on CUDA: copy the graph, in formats that its kernels take. Needs no GPU."""
    ort, _ = session_options()
    if graph.states:
        raise BuildError(
            f"{checkpoint}: ONNX Runtime does not run recurrent layers on CUDA; leave out --device cuda, or give "
            "--backend tensorrt or tensorrt_rtx"
        )
    if graph.kv_cache_dtype:
        raise BuildError(
            f"{checkpoint}: keys and values in {graph.kv_cache_dtype}: engines of ONNX Runtime for CUDA have no 8-bit "
            "caches here; convert without --kv_cache_dtype, or build with --backend tensorrt"
        )
    model = ir.load(checkpoint / GRAPH_NAME)
    if formats.has_float4(model):
        raise BuildError(
            f"{checkpoint}: ONNX Runtime has no float4 weights on CUDA; build with --backend tensorrt or tensorrt_rtx"
        )
    untied = untie_heads(model)
    if not untied:
        # No hard link: onnx_ir then refuses to read the checkpoint.
        shutil.copyfile(checkpoint / WEIGHTS_NAME, output / WEIGHTS_NAME)
    advance(1.0)
    notes = ["optimized on the GPU when it is loaded"]
    formats.split_block_scales(model)
    if graph.dtype != "float32":  # Flash attention has no float32.
        dropped, total = drop_causal_masks(model, build.cache_length)
        if total:
            others = "; the others need a mask" if dropped < total else ""
            notes.append(f"Flash attention is possible in {dropped} of {total} attention layers{others}")
    capturable = formats.can_be_captured(model)
    io = describe_io(model)
    if untied:
        graphs.save(model, output / GRAPH_NAME)
    else:
        (output / GRAPH_NAME).write_bytes(graphs.to_bytes(model))
    if not capturable:
        notes.append("rounds are queued call by call: not all of its operators are known to work in CUDA graphs")
    return Compiled(
        backend=BackendInfo(
            name="onnxruntime",
            version=ort.__version__,
            device="cuda",
            machine=platform.machine(),
            capturable=capturable,
        ),
        graph=graph,
        io=io,
        files=[GRAPH_NAME, WEIGHTS_NAME],
        notes=notes,
    )
