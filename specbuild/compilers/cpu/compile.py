"""Optimizes a checkpoint's graph for this processor and saves it, so that loading is quick.

``PASSES`` rewrite the graph, one after the other. ONNX Runtime then does what it knows at every load, once, here.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import onnx_ir as ir

from specbuild.compilers import Compiled
from specbuild.compilers.cpu import formats, norms
from specbuild.compilers.cpu.attention import fuse_cached_attention, pack_attention
from specbuild.compilers.cpu.collectives import use_collectives
from specbuild.compilers.cpu.experts import use_chosen_experts
from specbuild.compilers.cpu.fused_layers import fuse_layers
from specbuild.compilers.cpu.recurrent import use_recurrent_operators
from specbuild.compilers.cpu.rotation import look_up_by_position
from specbuild.compilers.cpu.unused import mark_unused_tokens
from specbuild.compilers.graph_io import describe_io
from specbuild.graph import ops as graphs
from specrun import cpu_operators
from specrun.backends.ort import session_options
from specrun.engine_dir.cache_tensors import packed_form
from specrun.engine_dir.config import GRAPH_NAME, WEIGHTS_NAME, BackendInfo, BuildConfig, GraphInfo, ValueBits
from specrun.engine_dir.directories import write_whole
from specrun.errors import BuildError


@dataclass
class Compilation:
    """A graph on its way to an engine. Passes change it in place."""

    checkpoint: Path
    model: ir.Model
    graph: GraphInfo
    build: BuildConfig
    output: Path
    value_bits: ValueBits | None
    """Bits of packed values, if the cache is to be packed."""
    notes: list[str] = field(default_factory=list)
    """What was done, for people."""
    has_recoded_weights: bool = False
    """Whether weights are read from the output directory."""
    skips_unused_tokens: bool = False


def compute_in_float32(work: Compilation) -> None:
    """Processors have no 16-bit arithmetic that ONNX Runtime uses: computing in float32 is exact and faster."""
    graphs.widen_to_float32(work.model)
    if work.graph.dtype != "float32":
        work.notes.append(f"{work.graph.dtype} checkpoint: computed in float32 on the CPU")
        work.graph = work.graph.model_copy(update={"dtype": "float32"})


def choose_experts(work: Compilation) -> None:
    """Experts that no token of a pass has chosen are not read. Before products, which takes their weights."""
    if mixtures := use_chosen_experts(work.model):
        work.notes.append(f"{mixtures} layers read only the experts that a pass uses")


def use_own_recurrent_layers(work: Compilation) -> None:
    """Recurrent layers are loops of standard operators otherwise."""
    if work.graph.states:
        work.graph = work.graph.with_replays(work.build.max_draft_len)
        use_recurrent_operators(work.model)
        recurrent = {state.layer for state in work.graph.states}
        work.notes.append(f"{len(recurrent)} recurrent layers by specrun's own CPU operators")


def use_own_collectives(work: Compilation) -> None:
    """Ranks exchange what they have computed."""
    if collectives := use_collectives(work.model):
        work.notes.append(f"{collectives} collectives of a pass")


def use_own_products(work: Compilation) -> None:
    """Weights get the layout of our products, which take in norms, gates and sums. Before attention joins these."""
    if prepared := formats.prepare(work.model):
        work.notes += prepared
        work.model = graphs.write_recoded(work.model, work.output)
        work.has_recoded_weights = True


def use_own_attention(work: Compilation) -> None:
    """Rotation, cache and attention of a layer become one operator; keys and values may be in few bits."""
    bits = work.value_bits
    if bits and pack_attention(work.model, work.build.cache_length, bits):
        work.graph = work.graph.with_packed_cache(bits)
        work.notes.append(f"keys and values in {packed_form(bits)}, which specrun's own CPU operators round by token")
    elif bits and (bits != 16 or work.build.kv_cache_dtype == "float16"):
        raise BuildError(
            f"{work.checkpoint}: --kv_cache_dtype: attention here is not one that specrun's own CPU operators compute "
            "(heads whose width is no multiple of 32, keys wider than values, or masks other than causal ones and "
            "windows); leave it out, for 'specbuild convert' too"
        )
    elif layers := fuse_cached_attention(work.model, work.build.cache_length):
        work.notes.append(f"attention of {layers} layers by specrun's own CPU operators")


def use_own_norms(work: Compilation) -> None:
    """Norms that no product has taken in would stand between our operators. After attention, which reads some."""
    norms.use_own_norms(work.model)


def look_up_positions(work: Compilation) -> None:
    """What depends on positions alone is computed once. Behind attention, which has tables of its own."""
    look_up_by_position(work.model, work.build.cache_length)


def leave_out_unused_tokens(work: Compilation) -> None:
    """Padding costs nothing where every operator leaves it out. After our own operators, which do."""
    work.skips_unused_tokens = not work.graph.is_head and not work.graph.states and mark_unused_tokens(work.model)


PASSES: tuple[Callable[[Compilation], None], ...] = (
    compute_in_float32,
    choose_experts,
    use_own_recurrent_layers,
    use_own_collectives,
    use_own_products,
    use_own_attention,
    use_own_norms,
    look_up_positions,
    leave_out_unused_tokens,
)
"""The passes in the order in which they run."""


def compile_graph(
    checkpoint: Path, graph: GraphInfo, build: BuildConfig, output: Path, advance: Callable[[float], None]
) -> Compiled:
    """Optimize the graph for this processor and save it. See ``Compiler``."""
    model, value_bits = ir.load(checkpoint / GRAPH_NAME), build.value_bits(graph)
    work = Compilation(checkpoint, model, graph, build, output, value_bits)
    for rewrite in PASSES:
        rewrite(work)
    work.model.opset_imports[cpu_operators.DOMAIN] = cpu_operators.VERSION
    advance(0.1)
    version = _optimize(work)
    graphs.remove_recoded(output)
    _fuse(work)
    advance(0.9)
    return Compiled(
        backend=BackendInfo(
            name="onnxruntime",
            version=version,
            device="cpu",
            machine=platform.machine(),
            needs_cpu_operators=cpu_operators.VERSION,
            skips_unused_tokens=work.skips_unused_tokens,
        ),
        graph=work.graph,
        io=describe_io(work.model),
        files=[name for name in (GRAPH_NAME, WEIGHTS_NAME) if (output / name).exists()],
        notes=work.notes,
    )


def _fuse(work: Compilation) -> None:
    """Join what ONNX Runtime has left of our own operators; it knows no node that others are joined in."""
    path = work.output / GRAPH_NAME
    model = ir.load(path)
    if stages := fuse_layers(model.graph):
        write_whole(path, graphs.to_bytes(model))
        work.notes.append(f"{stages} operators in one node")


def _optimize(work: Compilation) -> str:
    """Let ONNX Runtime optimize the graph and save it. Returns its release. Raises BuildError."""
    ort, options = session_options()
    cpu_operators.register(options)
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.optimized_model_filepath = str(work.output / GRAPH_NAME)
    weights = work.output if work.has_recoded_weights else work.checkpoint
    entries = {
        "optimized_model_external_initializers_file_name": WEIGHTS_NAME,
        "optimized_model_external_initializers_min_size_in_bytes": "1024",
        "model_external_initializers_file_folder_path": str(weights),
        "disable_prepacking": "1",  # Nothing is run here: laying weights out for their kernels would only copy them.
    }
    for name, value in entries.items():
        options.add_session_config_entry(f"session.{name}", value)
    try:
        ort.InferenceSession(graphs.to_bytes(work.model), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's exceptions share no base class.
        raise BuildError(f"{work.checkpoint}: ONNX Runtime refused the graph: {error}") from error
    return str(ort.__version__)
