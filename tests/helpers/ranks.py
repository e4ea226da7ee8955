"""All ranks of a model in one graph: an all-reduce is a sum, an all-gather puts its inputs one behind the other."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import onnxruntime as ort

from specbuild.compilers.cpu.recurrent import use_recurrent_operators
from specbuild.graph import ops as graphs
from specbuild.sharding.collectives import COLLECTIVE
from specbuild.sharding.shard import shard
from specrun import cpu_operators
from specrun.backends.ort_session import session_options
from specrun.engine_dir.config import GRAPH_NAME
from specrun.engine_dir.contract import INPUT_IDS, KEEP_INDICES, LOGITS_INDICES, STATE_INDICES, WRITE_INDICES
from tests.helpers.engines import make_onnx, once
from tests.helpers.families import save_checkpoint

SHARED = {INPUT_IDS, WRITE_INDICES, LOGITS_INDICES, STATE_INDICES, KEEP_INDICES, ""}
POSITIONS, REPLAYS = 32, 16
Arrays = dict[str, npt.NDArray[Any]]


def make_checkpoint(shared: Path, family: str, **convert: Any) -> Path:
    """A family's ONNX checkpoint, made once for all tests."""

    def build(directory: Path) -> None:
        make_onnx(save_checkpoint(directory / "hf", family), directory / "onnx", verify=False, **convert)

    return once(shared / "-".join(["ranks", family, *convert.values()]), build) / "onnx"


def load(checkpoint: Path) -> ir.Model:
    """A checkpoint's graph in float32."""
    model = ir.load(checkpoint / GRAPH_NAME)
    graphs.widen_to_float32(model)
    return model


def shards(checkpoint: Path, ranks: int) -> list[onnx.ModelProto]:
    """Every rank's graph, with its weights."""
    made = []
    for rank in range(ranks):
        model = load(checkpoint)
        shard(model, rank, ranks)
        made.append(_with_weights(model))
    return made


def shard_difference(checkpoint: Path, ranks: int) -> float:
    """The largest difference of a logit between ``ranks`` ranks and one, as a share of the largest logit.

    Two rows of different lengths, with random keys and values.
    """
    whole, parts = _session(_with_weights(load(checkpoint))), shards(checkpoint, ranks)
    generator = np.random.default_rng(0)
    feed = _inputs(whole, generator)
    expected = whole.run(["logits"], feed)[0]
    joined = _session(_join(parts))
    own = {name: array for name, array in feed.items() if name in SHARED}
    for rank, part in enumerate(parts):
        for value in part.graph.input:
            if value.name not in SHARED:
                heads = value.type.tensor_type.shape.dim[1].dim_value
                before = [other.graph.input[list(part.graph.input).index(value)] for other in parts[:rank]]
                first = sum(one.type.tensor_type.shape.dim[1].dim_value for one in before)
                own[_name(value.name, rank)] = _heads(feed[value.name], first, heads, rank, ranks)
    found = joined.run([_name("logits", rank) for rank in range(ranks)], own)
    scale = float(np.abs(expected).max())
    return max(float(np.abs(logits - expected).max()) / scale for logits in found)


def _heads(array: npt.NDArray[Any], first: int, heads: int, rank: int, ranks: int) -> npt.NDArray[Any]:
    """What a rank has: all, or heads that no other has, or the one that it shares."""
    if array.ndim != 4 or heads in (0, array.shape[1]):
        return array
    if array.shape[1] < ranks:
        first = rank * array.shape[1] // ranks
    return array[:, first : first + heads]


def _inputs(session: Any, generator: np.random.Generator) -> Arrays:
    given = {
        INPUT_IDS: generator.integers(0, 200, (2, 5)),
        WRITE_INDICES: np.array([3, 0]),
        LOGITS_INDICES: np.array([[0, 4], [2, 3]]),
        STATE_INDICES: np.array([3, 0]),
        KEEP_INDICES: np.array([8, 5]),
    }
    feed: Arrays = {}
    for value in session.get_inputs():
        if value.name in given:
            feed[value.name] = given[value.name]
            continue
        free = POSITIONS if value.name.startswith("past_key_values.") else REPLAYS + 3
        shape = [2, *(size if isinstance(size, int) else free for size in value.shape[1:])]
        if value.type == "tensor(int8)":
            feed[value.name] = generator.integers(-99, 99, shape).astype(np.int8)
        else:
            feed[value.name] = generator.standard_normal(shape).astype(np.float32) * np.float32(0.5)
    return feed


def _session(model: onnx.ModelProto) -> Any:
    _, options = session_options()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    cpu_operators.register(options)
    return ort.InferenceSession(model.SerializeToString(), options)


def _with_weights(model: ir.Model) -> onnx.ModelProto:
    if model.functions:
        use_recurrent_operators(model)
    with tempfile.TemporaryDirectory() as folder:
        graphs.save(model, Path(folder) / GRAPH_NAME)
        return onnx.load(Path(folder) / GRAPH_NAME)


def _name(name: str, rank: int) -> str:
    return name if name in SHARED else f"{name}@{rank}"


def _join(parts: list[onnx.ModelProto]) -> onnx.ModelProto:
    graph = onnx.GraphProto(name="all ranks")
    for nodes in zip(*(part.graph.node for part in parts), strict=True):
        assert len({node.op_type for node in nodes}) == 1, "ranks have different nodes"
        if nodes[0].op_type == COLLECTIVE:
            _add_collective(graph, nodes)
            continue
        for rank, node in enumerate(nodes):
            own = graph.node.add()
            own.CopyFrom(node)
            own.name = f"{node.name}@{rank}"
            for names in (own.input, own.output):
                names[:] = [_name(name, rank) for name in names]
    for rank, part in enumerate(parts):
        groups = ((part.graph.initializer, graph.initializer), (part.graph.input, graph.input))
        for given, target in (*groups, (part.graph.output, graph.output)):
            for value in given:
                if not (rank and value.name in SHARED):
                    target.add().CopyFrom(value)
                    target[-1].name = _name(value.name, rank)
    first = parts[0]
    return onnx.helper.make_model(graph, opset_imports=list(first.opset_import), ir_version=first.ir_version)


def _add_collective(graph: onnx.GraphProto, nodes: tuple[onnx.NodeProto, ...]) -> None:
    attributes = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in nodes[0].attribute}
    assert attributes["nb_rank"] == len(nodes)
    inputs, result = [_name(node.input[0], rank) for rank, node in enumerate(nodes)], f"{nodes[0].output[0]}@all"
    if attributes["collective_operation"] == b"all_reduce":
        graph.node.append(onnx.helper.make_node("Sum", inputs, [result]))
    else:
        graph.node.append(onnx.helper.make_node("Concat", inputs, [result], axis=0))
    for rank, node in enumerate(nodes):
        graph.node.append(onnx.helper.make_node("Identity", [result], [_name(node.output[0], rank)]))
