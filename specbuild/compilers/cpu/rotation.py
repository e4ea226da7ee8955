"""Cosines and sines of positions, computed when an engine is built.

What rotates queries and keys depends on a token's position alone. A graph has a dozen small operators for that, which a
small draft model feels in each of its steps.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper
from onnx_ir.passes.common import RemoveUnusedNodesPass

from specbuild.graph.ops import constant, initializer
from specrun.backends.ort_session import session_options
from specrun.engine_dir.contract import INPUT_IDS, WRITE_INDICES

Floats = npt.NDArray[np.float32]
Angles = tuple[ir.Value, ir.Value]
"""Cosines and sines: of the tokens of a pass [B, S, R / 2], or of positions [P, R / 2]."""
_ROUNDED_BY_PLACE = ("Sin", "Cos", "Log")
"""Operators of ONNX Runtime that round the last numbers of a tensor otherwise than the first ones."""
_ERROR = 1e-6
"""A processor's vectors may round a sine otherwise than what it computes one by one."""


def angles_by_position(graph: ir.Graph, angles: Angles, cache_length: int) -> Angles | None:
    """The tables that give ``angles`` of tokens; None where they depend on more than positions. cache_length: P."""
    tables = _tables(graph, angles, cache_length)
    return (tables[0], tables[1]) if tables else None


def look_up_by_position(model: ir.Model, cache_length: int) -> None:
    """Let sines, cosines and logarithms that depend on a token's position alone be looked up, in place.

    ONNX Runtime rounds some numbers of a tensor otherwise than others, so a token's bits would depend on how many
    tokens a pass has.
    """
    graph, positions = model.graph, None
    for node in [node for node in graph if node.op_type in _ROUNDED_BY_PLACE]:
        (value,) = node.outputs
        if not (tables := _tables(graph, (value,), cache_length)):
            continue
        positions = positions or _positions(graph, cache_length)
        look = ir.node("Gather", [tables[0], positions], name=f"{value.name}.of_tokens")
        look.outputs[0].name, look.outputs[0].type = look.name, value.type
        value.replace_all_uses_with(look.outputs[0])
        graph.insert_after(node, look)
    RemoveUnusedNodesPass()(model)


def _positions(graph: ir.Graph, cache_length: int) -> ir.Value:
    """Positions [B, S] of a pass's tokens; padding may stand behind the last one."""
    inputs = {value.name: value for value in graph.inputs}
    zero, step, axis, last = (
        constant(graph, f"positions.{name}", number)
        for name, number in (("zero", 0), ("one", 1), ("axis", [1]), ("last", cache_length - 1))
    )
    size = ir.node("Shape", [inputs[INPUT_IDS]], {"start": 1, "end": 2})
    number = ir.node("Squeeze", size.outputs)
    tokens = ir.node("Range", [zero, number.outputs[0], step])
    rows = ir.node("Unsqueeze", [inputs[WRITE_INDICES], axis])
    total = ir.node("Add", [rows.outputs[0], tokens.outputs[0]])
    nodes = [size, number, tokens, rows, total, ir.node("Clip", [total.outputs[0], None, last])]
    for node in nodes:
        node.name = node.outputs[0].name = f"positions.{node.op_type}"
        node.outputs[0].dtype = ir.DataType.INT64
    graph.insert_before(next(iter(graph)), nodes)
    return nodes[-1].outputs[0]


def _tables(graph: ir.Graph, values: tuple[ir.Value, ...], cache_length: int) -> list[ir.Value]:
    """Tables [P, ..] of what ``values`` [B, S, ..] are at each position; empty where they depend on more."""
    if (nodes := _producers(values)) is None:
        return []
    run = _compile([node for node in graph if node in nodes], values, graph.opset_imports)
    whole = run(np.arange(cache_length), 1)
    if any(each.ndim < 2 or each.shape[:2] != (cache_length, 1) for each in whole):
        return []
    tables = [each[:, 0] for each in whole]
    for tokens in (size for size in (1, 2, 5) if size <= cache_length):
        for first in np.linspace(0, cache_length - tokens, 7).astype(np.int64):
            # All positions were in one pass above. A row by itself shows whether they depend on each other.
            for table, actual in zip(tables, run(first[None], tokens), strict=True):
                expected = table[None, first : first + tokens]
                if actual.shape != expected.shape or not np.allclose(actual, expected, rtol=_ERROR, atol=_ERROR):
                    return []
    return [
        initializer(graph, f"{value.name}.by_position", ir.tensor(np.ascontiguousarray(table)))
        for value, table in zip(values, tables, strict=True)
    ]


def _producers(values: tuple[ir.Value, ...]) -> set[ir.Node] | None:
    """What computes ``values`` of write_indices and sizes; None where others are read, or there are branches."""
    nodes: set[ir.Node] = set()
    left = list(values)
    while left:
        value = left.pop()
        node = value.producer()
        if node is None:
            if value.const_value is None and value.name != WRITE_INDICES:
                return None
        elif node not in nodes:
            if any(attribute.type == ir.AttributeType.GRAPH for attribute in node.attributes.values()):
                return None
            nodes.add(node)
            reads_sizes = node.op_type == "Shape" and node.inputs[0] is not None and node.inputs[0].name == INPUT_IDS
            left += [] if reads_sizes else [given for given in node.inputs if given is not None]
    return nodes


def _compile(
    nodes: list[ir.Node], outputs: tuple[ir.Value, ...], imports: dict[str, int]
) -> Callable[..., list[Floats]]:
    """A function of the first tokens' positions [B] and the number of tokens S, which computes ``outputs``."""
    inputs = [helper.make_tensor_value_info(INPUT_IDS, TensorProto.INT64, ["B", "S"])]
    inputs.append(helper.make_tensor_value_info(WRITE_INDICES, TensorProto.INT64, ["B"]))
    results = [helper.make_tensor_value_info(str(value.name), TensorProto.FLOAT, None) for value in outputs]
    given = {value for node in nodes for value in node.inputs if value is not None and value.is_initializer()}
    tensors = [(value.const_value, value.name) for value in given]
    constants = [numpy_helper.from_array(tensor.numpy(), name) for tensor, name in tensors if tensor is not None]
    graph = helper.make_graph([ir.to_proto(node) for node in nodes], "angles", inputs, results, constants)
    opsets = [helper.make_opsetid(domain, version) for domain, version in imports.items()]
    ort, options = session_options()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()
    session = ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])

    def run(first: npt.NDArray[np.int64], tokens: int) -> list[Floats]:
        feed = {INPUT_IDS: np.zeros((len(first), tokens), np.int64), WRITE_INDICES: first}
        outputs: list[Floats] = session.run(None, feed)
        return outputs

    return run
