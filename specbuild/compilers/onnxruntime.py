"""ONNX Runtime: for the CPU, the graph optimized for this machine at build time and saved, so that loading is quick.

For CUDA the graph is the checkpoint's own, less masks that would keep ONNX Runtime from Flash attention, and in forms
that can be captured. ONNX Runtime optimizes it on the GPU when it loads it.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import onnx
import onnx_ir as ir

from specbuild.compilers import Compiled, cpu_forms, cuda_forms, machine
from specbuild.compilers.cpu_attention import fuse_cached_attention, pack_attention
from specbuild.compilers.cpu_collectives import use_collectives
from specbuild.compilers.cpu_recurrent import use_recurrent_operators
from specbuild.compilers.cpu_unused import mark_unused_tokens
from specbuild.graph import ops as graphs
from specbuild.graph.attention_layers import join_attention
from specbuild.graph.causal_mask import drop_causal_masks
from specbuild.graph.moe_branches import skip_unused_experts
from specbuild.graph.pad_single_query import pad_single_queries
from specbuild.graph.untie import untie_heads
from specrun import cpu_operators
from specrun.backends.ort import session_options
from specrun.cpu_operators import DOMAIN
from specrun.engine_dir.config import (
    GRAPH_NAME,
    VALUE_BITS,
    WEIGHTS_NAME,
    BackendInfo,
    BuildConfig,
    GraphInfo,
    Tensor,
)
from specrun.engine_dir.dtypes import DTYPES
from specrun.errors import BuildError


def compile_graph(
    checkpoint: Path, graph: GraphInfo, build: BuildConfig, output: Path, advance: Callable[[float], None]
) -> Compiled:
    """Optimize the graph for this processor and save it. See ``Compiler``."""
    ort, options = session_options()
    notes = []
    model = ir.load(checkpoint / GRAPH_NAME)
    # Processors have no 16-bit arithmetic that ONNX Runtime uses: computing in float32 is exact and faster.
    graphs.widen_to_float32(model)
    if graph.dtype != "float32":
        notes.append(f"{graph.dtype} checkpoint: computed in float32 on the CPU")
        graph = graph.model_copy(update={"dtype": "float32"})
    if mixtures := skip_unused_experts(model):
        notes.append(f"{mixtures} layers read only the experts that a pass uses")
    own_operators = cpu_operators.are_fast()
    if machine() == "x86_64" and not cpu_operators.is_available():
        notes.append(f"without specrun's own CPU operators, which are faster: {cpu_operators.HOW_TO_COMPILE}")
    if graph.states:
        if not cpu_operators.is_available():
            raise BuildError(
                f"{checkpoint}: recurrent layers need specrun's own CPU operators, which were not compiled here: "
                f"{cpu_operators.HOW_TO_COMPILE}"
            )
        graph = graph.with_replays(build.max_draft_len)
        use_recurrent_operators(model)
        recurrent = {state.layer for state in graph.states}
        notes.append(f"{len(recurrent)} recurrent layers by specrun's own CPU operators")
    if collectives := use_collectives(model):
        notes.append(f"{collectives} collectives of a pass")
    if prepared := cpu_forms.prepare(model, own_operators):
        notes += prepared
        model = graphs.write_recoded(model, output)
    if bits := VALUE_BITS[build.kv_cache_dtype] or (8 if graph.kv_cache_dtype else None):
        if not cpu_operators.is_available():
            raise BuildError(
                f"{checkpoint}: keys and values in 8 bits need specrun's own CPU operators, which were not compiled "
                f"here: {cpu_operators.HOW_TO_COMPILE}"
            )
        if not pack_attention(model, build.cache_length, bits):
            raise BuildError(
                f"{checkpoint}: --kv_cache_dtype: attention here is not one that specrun's own CPU operators compute "
                "(heads whose width is no multiple of 32, keys wider than values, or masks other than causal ones and "
                "windows); leave it out, for 'specbuild convert' too"
            )
        graph = graph.with_packed_cache(bits)
        notes.append(f"keys in 8 and values in {bits} bits, which specrun's own CPU operators round by token")
    elif own_operators and (layers := fuse_cached_attention(model, build.cache_length)):
        notes.append(f"attention of {layers} layers by specrun's own CPU operators")
    harmful = cpu_forms.HARMFUL if _dequantizes(model) else []
    skips_unused = not graph.is_head and not graph.states and mark_unused_tokens(model)
    if not graph.is_head:  # Only the bits of a target are those of texts.
        join_attention(model)
        pad_single_queries(model)
    has_own = DOMAIN in model.opset_imports
    if has_own:
        cpu_operators.register(options)
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.optimized_model_filepath = str(output / GRAPH_NAME)
    options.add_session_config_entry("session.optimized_model_external_initializers_file_name", WEIGHTS_NAME)
    options.add_session_config_entry("session.optimized_model_external_initializers_min_size_in_bytes", "1024")
    weights = output if prepared else checkpoint
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(weights))
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", cpu_forms.ACCURACY_LEVEL)
    # Nothing is run here: laying weights out for their kernels would only copy all of them.
    options.add_session_config_entry("session.disable_prepacking", "1")
    advance(0.1)
    try:
        ort.InferenceSession(
            graphs.to_bytes(model), options, providers=["CPUExecutionProvider"], disabled_optimizers=harmful
        )
    except Exception as error:  # ONNX Runtime's exceptions share no base class.
        raise BuildError(f"{checkpoint}: ONNX Runtime refused the graph: {error}") from error
    graphs.remove_recoded(output)
    if not has_own:
        _drop_own_domain(output / GRAPH_NAME)
    advance(0.9)
    return Compiled(
        backend=BackendInfo(
            name="onnxruntime",
            version=ort.__version__,
            device="cpu",
            machine=machine(),
            needs_cpu_operators=cpu_operators.VERSION if has_own else 0,
            skips_unused_tokens=skips_unused,
        ),
        graph=graph,
        io=_io(model),
        files=[name for name in (GRAPH_NAME, WEIGHTS_NAME) if (output / name).exists()],
        notes=notes,
    )


def _drop_own_domain(path: Path) -> None:
    """ONNX Runtime notes every domain that this process has used; a graph that does not need ours must not have it."""
    model = onnx.load(path, load_external_data=False)
    others = [known for known in model.opset_import if known.domain != DOMAIN]
    if len(others) < len(model.opset_import):
        del model.opset_import[:]
        model.opset_import.extend(others)
        path.write_bytes(model.SerializeToString())


def copy_graph(
    checkpoint: Path, graph: GraphInfo, build: BuildConfig, output: Path, advance: Callable[[float], None]
) -> Compiled:
    """Take the graph for CUDA, in the forms that its kernels take; needs no GPU. See ``Compiler``."""
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
    if cuda_forms.has_float4(model):
        raise BuildError(
            f"{checkpoint}: ONNX Runtime has no float4 weights on CUDA; build with --backend tensorrt or tensorrt_rtx"
        )
    untied = untie_heads(model)
    if not untied:
        shutil.copyfile(checkpoint / WEIGHTS_NAME, output / WEIGHTS_NAME)
    advance(1.0)
    notes = ["optimized on the GPU when it is loaded"]
    cuda_forms.split_block_scales(model)
    if graph.dtype != "float32":  # Flash attention has no float32.
        dropped, total = drop_causal_masks(model, build.cache_length)
        if total:
            others = "; the others need a mask" if dropped < total else ""
            notes.append(f"Flash attention is possible in {dropped} of {total} attention layers{others}")
    capturable = cuda_forms.can_be_captured(model)
    io = _io(model)
    if untied:
        graphs.save(model, output / GRAPH_NAME)
    else:
        (output / GRAPH_NAME).write_bytes(graphs.to_bytes(model))
    if not capturable:
        notes.append("rounds are queued call by call: not all of its operators are known to work in CUDA graphs")
    return Compiled(
        backend=BackendInfo(
            name="onnxruntime", version=ort.__version__, device="cuda", machine=machine(), capturable=capturable
        ),
        graph=graph,
        io=io,
        files=[GRAPH_NAME, WEIGHTS_NAME],
        notes=notes,
    )


def _dequantizes(model: ir.Model) -> bool:
    return any(node.op_type == "DequantizeLinear" for node in graphs.all_nodes(model))


_NAMES = {dtype.onnx: dtype.name for dtype in DTYPES.values()}


def _io(model: ir.Model) -> list[Tensor]:
    inputs = [_tensor(value, "input") for value in model.graph.inputs]
    return inputs + [_tensor(value, "output") for value in model.graph.outputs]


def _tensor(value: ir.Value, kind: Literal["input", "output"]) -> Tensor:
    name, dtype = str(value.name), _NAMES[int(value.dtype or 0)]
    shape = [size if isinstance(size, int) else str(size) for size in value.shape or ()]
    # A cache output shares the memory of its input.
    alias = None
    for present, past in (("present.", "past_key_values."), ("present_states.", "past_states.")):
        if name.startswith(present):
            alias = name.replace(present, past)
    return Tensor(name=name, kind=kind, dtype=dtype, shape=shape, aliases=alias)
