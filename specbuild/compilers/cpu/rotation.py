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

from specbuild.graph.ops import initializer
from specrun.backends.ort_session import session_options
from specrun.engine_dir.contract import INPUT_IDS, WRITE_INDICES

Floats = npt.NDArray[np.float32]
Angles = tuple[ir.Value, ir.Value]
"""Cosines and sines: of the tokens of a pass [B, S, R / 2], or of positions [P, R / 2]."""
_ERROR = 1e-6
"""A processor's vectors may round a sine otherwise than what it computes one by one."""


def angles_by_position(graph: ir.Graph, angles: Angles, cache_length: int) -> Angles | None:
    """The tables that give ``angles`` of tokens; None where they depend on more than positions. cache_length: P."""
    if (nodes := _producers(angles)) is None:
        return None
    run = _compile([node for node in graph if node in nodes], angles, graph.opset_imports)
    tables = [each[:, 0] for each in run(np.arange(cache_length), 1)]
    if any(len(table) != cache_length for table in tables):
        return None
    for tokens in (size for size in (1, 2, 5) if size <= cache_length):
        for first in np.linspace(0, cache_length - tokens, 7).astype(np.int64):
            # All positions were in one pass above. A row by itself shows whether they depend on each other.
            for table, actual in zip(tables, run(first[None], tokens), strict=True):
                expected = table[None, first : first + tokens]
                if actual.shape != expected.shape or not np.allclose(actual, expected, rtol=0, atol=_ERROR):
                    return None
    cos, sin = (
        initializer(graph, f"{value.name}.by_position", ir.tensor(np.ascontiguousarray(table)))
        for value, table in zip(angles, tables, strict=True)
    )
    return cos, sin


def _producers(values: Angles) -> set[ir.Node] | None:
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


def _compile(nodes: list[ir.Node], outputs: Angles, imports: dict[str, int]) -> Callable[..., list[Floats]]:
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
