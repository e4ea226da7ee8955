"""Optimizes a checkpoint's graph for this processor and saves it, so that loading is quick.

``PASSES`` rewrite the graph, one after the other. ONNX Runtime then does what it knows at every load, once, here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import onnx_ir as ir

from specbuild.compilers import Compiled, machine
from specbuild.compilers.cpu import forms
from specbuild.compilers.cpu.attention import fuse_cached_attention, pack_attention
from specbuild.compilers.cpu.collectives import use_collectives
from specbuild.compilers.cpu.recurrent import use_recurrent_operators
from specbuild.compilers.cpu.unused import mark_unused_tokens
from specbuild.compilers.graph_io import describe_io
from specbuild.graph import ops as graphs
from specbuild.graph.attention_layers import join_attention
from specbuild.graph.moe_branches import skip_unused_experts
from specbuild.graph.pad_single_query import pad_single_queries
from specrun import cpu_operators
from specrun.backends.ort import session_options
from specrun.engine_dir.config import GRAPH_NAME, VALUE_BITS, WEIGHTS_NAME, BackendInfo, BuildConfig, GraphInfo
from specrun.errors import BuildError


@dataclass
class Compilation:
    """A graph on its way to an engine. Passes change it in place."""

    checkpoint: Path
    model: ir.Model
    graph: GraphInfo
    build: BuildConfig
    output: Path
    notes: list[str] = field(default_factory=list)
    """What was done, for people."""
    has_recoded_weights: bool = False
    """Whether weights are read from the output directory."""
    skips_unused_tokens: bool = False


def compute_in_float32(c: Compilation) -> None:
    """Processors have no 16-bit arithmetic that ONNX Runtime uses: computing in float32 is exact and faster."""
    graphs.widen_to_float32(c.model)
    if c.graph.dtype != "float32":
        c.notes.append(f"{c.graph.dtype} checkpoint: computed in float32 on the CPU")
        c.graph = c.graph.model_copy(update={"dtype": "float32"})


def branch_to_experts(c: Compilation) -> None:
    """Experts that no token of a pass uses are not read. In float32, whose operators know the branches' types."""
    if mixtures := skip_unused_experts(c.model):
        c.notes.append(f"{mixtures} layers read only the experts that a pass uses")


def use_own_recurrent_layers(c: Compilation) -> None:
    """Recurrent layers are loops of standard operators otherwise."""
    if c.graph.states:
        c.graph = c.graph.with_replays(c.build.max_draft_len)
        use_recurrent_operators(c.model)
        recurrent = {state.layer for state in c.graph.states}
        c.notes.append(f"{len(recurrent)} recurrent layers by specrun's own CPU operators")


def use_own_collectives(c: Compilation) -> None:
    """Ranks exchange what they have computed."""
    if collectives := use_collectives(c.model):
        c.notes.append(f"{collectives} collectives of a pass")


def use_own_products(c: Compilation) -> None:
    """Weights get the layout of our products, which take norms, gates and sums in. Before attention, which joins them.

    On processors whose vectors our products do not know, ONNX Runtime's are faster.
    """
    if prepared := forms.prepare(c.model, cpu_operators.are_fast()):
        c.notes += prepared
        c.model = graphs.write_recoded(c.model, c.output)
        c.has_recoded_weights = True


def use_own_attention(c: Compilation) -> None:
    """Rotation, cache and attention of a layer become one operator; keys and values may be in few bits."""
    bits = VALUE_BITS[c.build.kv_cache_dtype] or (8 if c.graph.kv_cache_dtype else None)
    if bits is None:
        if layers := fuse_cached_attention(c.model, c.build.cache_length):
            c.notes.append(f"attention of {layers} layers by specrun's own CPU operators")
        return
    if not pack_attention(c.model, c.build.cache_length, bits):
        raise BuildError(
            f"{c.checkpoint}: --kv_cache_dtype: attention here is not one that specrun's own CPU operators compute "
            "(heads whose width is no multiple of 32, keys wider than values, or masks other than causal ones and "
            "windows); leave it out, for 'specbuild convert' too"
        )
    c.graph = c.graph.with_packed_cache(bits)
    c.notes.append(f"keys in 8 and values in {bits} bits, which specrun's own CPU operators round by token")


def leave_out_unused_tokens(c: Compilation) -> None:
    """Padding costs nothing where every operator leaves it out. Behind our own operators, which do."""
    c.skips_unused_tokens = not c.graph.is_head and not c.graph.states and mark_unused_tokens(c.model)


def pad_queries(c: Compilation) -> None:
    """Attention that is left to ONNX Runtime never has a single query, which would get other bits."""
    if not c.graph.is_head:  # Only the bits of a target are those of texts.
        join_attention(c.model)
        pad_single_queries(c.model)


PASSES: tuple[Callable[[Compilation], None], ...] = (
    compute_in_float32,
    branch_to_experts,
    use_own_recurrent_layers,
    use_own_collectives,
    use_own_products,
    use_own_attention,
    leave_out_unused_tokens,
    pad_queries,
)
"""The passes in the order in which they run."""


def compile_graph(
    checkpoint: Path, graph: GraphInfo, build: BuildConfig, output: Path, advance: Callable[[float], None]
) -> Compiled:
    """Optimize the graph for this processor and save it. See ``Compiler``."""
    c = Compilation(checkpoint, ir.load(checkpoint / GRAPH_NAME), graph, build, output)
    for rewrite in PASSES:
        rewrite(c)
    c.model.opset_imports[cpu_operators.DOMAIN] = cpu_operators.VERSION
    advance(0.1)
    version = _optimize(c)
    graphs.remove_recoded(output)
    advance(0.9)
    return Compiled(
        backend=BackendInfo(
            name="onnxruntime",
            version=version,
            device="cpu",
            machine=machine(),
            needs_cpu_operators=cpu_operators.VERSION,
            skips_unused_tokens=c.skips_unused_tokens,
        ),
        graph=c.graph,
        io=describe_io(c.model),
        files=[name for name in (GRAPH_NAME, WEIGHTS_NAME) if (output / name).exists()],
        notes=c.notes,
    )


def _optimize(c: Compilation) -> str:
    """Let ONNX Runtime optimize the graph and save it. Returns its release. Raises BuildError."""
    ort, options = session_options()
    cpu_operators.register(options)
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.optimized_model_filepath = str(c.output / GRAPH_NAME)
    weights = c.output if c.has_recoded_weights else c.checkpoint
    entries = {
        "optimized_model_external_initializers_file_name": WEIGHTS_NAME,
        "optimized_model_external_initializers_min_size_in_bytes": "1024",
        "model_external_initializers_file_folder_path": str(weights),
        "qdq_matmulnbits_accuracy_level": forms.ACCURACY_LEVEL,
        "disable_prepacking": "1",  # Nothing is run here: laying weights out for their kernels would only copy them.
    }
    for name, value in entries.items():
        options.add_session_config_entry(f"session.{name}", value)
    dequantizes = any(node.op_type == "DequantizeLinear" for node in graphs.all_nodes(c.model))
    harmful = forms.HARMFUL if dequantizes else []
    try:
        ort.InferenceSession(
            graphs.to_bytes(c.model), options, providers=["CPUExecutionProvider"], disabled_optimizers=harmful
        )
    except Exception as error:  # ONNX Runtime's exceptions share no base class.
        raise BuildError(f"{c.checkpoint}: ONNX Runtime refused the graph: {error}") from error
    return str(ort.__version__)
