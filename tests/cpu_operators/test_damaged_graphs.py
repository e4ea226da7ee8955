"""Graphs that lie about their tensors: an error or a result, never memory that is not theirs.

Under ``scripts/test_sanitized`` AddressSanitizer looks on.
"""

from __future__ import annotations

import os
import random
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper

from specrun import cpu_operators
from specrun.backends.ort_session import session_options
from tests.cpu_operators.test_collectives import Others

pytestmark = pytest.mark.skipif(not cpu_operators.is_available(), reason=cpu_operators.HOW_TO_COMPILE)

DAMAGES = int(os.environ.get("SPECRUN_TEST_DAMAGES", "150"))
"""Damaged graphs of each operator."""
NEAR_THE_END = 2**63 - 3
NUMBERS = (-(2**63), -(2**31), -1, 0, 1, 2, 3, 5, 16, 33, 2**16 + 1, 2**24 + 1, 2**31, 2**32 + 1, 2**62, NEAR_THE_END)


class Node(NamedTuple):
    """One node that computes something."""

    operator: str
    inputs: dict[str, npt.NDArray[Any]]
    """'' stands for one that is left out."""
    attributes: dict[str, Any]
    outputs: int


def floats(*shape: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def ints(*numbers: int) -> npt.NDArray[np.int64]:
    return np.array(numbers, np.int64)


def attention() -> Node:
    cache = {"keys": floats(2, 2, 24, 16), "values": floats(2, 2, 24, 16)}
    new = {"q": floats(2, 3, 64), "k": floats(2, 3, 32), "v": floats(2, 3, 32)}
    angles = {"cos": floats(24, 8), "sin": floats(24, 8)}
    attributes = {"rotated": 16, "interleaved": 0, "window": 0, "scale": 0.25, "softcap": 2.0}
    inputs: dict[str, npt.NDArray[Any]] = {**new, **cache, "first": ints(4, 21), **angles, "sinks": floats(4)}
    return Node("CachedAttention", inputs, attributes, 3)


def fused() -> Node:
    """A product, and another one of what it gives: the first one's outputs are a result and a value between stages."""
    product = float_product()
    lines = floats(2 * 10 * 16)
    inputs = {**product.inputs, "weight 2": lines}
    attributes = {f"0.{name}": value for name, value in product.attributes.items()} | {"1.K": 10, "1.N": [30]}
    arguments = [3, 0, 1, 2, 2, 4, 6, 2, 6, 3, 1, 5]
    return Node("FusedLayers", inputs, {"stages": "FloatMatMul FloatMatMul", "arguments": arguments, **attributes}, 2)


def norm() -> Node:
    inputs = {"x": floats(2, 3, 64), "weight": floats(32), "residual": floats(2, 3, 64)}
    return Node("RMSNorm", inputs, {"epsilon": 1e-5}, 1)


def float_product() -> Node:
    lines = floats(3 * 40 * 16)  # Three panels of 16 columns, 40 inputs.
    attributes = {"K": 40, "N": [20, 10], "made": 1, "epsilon": 1e-5}
    return Node("FloatMatMul", {"x": floats(5, 40), "weight": lines, "other": floats(40)}, attributes, 2)


def quantized_product(half_scales: bool) -> Node:
    codes = np.random.default_rng(0).integers(0, 256, 3 * 8 * 64, np.uint8)  # 64 inputs in 4 bits.
    scales: npt.NDArray[Any] = floats(3 * 2 * 16)
    if half_scales:
        scales = (scales.view(np.uint32) >> 16).astype(np.uint16)
    inputs = {"x": floats(5, 64), "codes": codes, "scales": scales, "zeros": np.ones(3 * 2 * 16, np.int8)}
    attributes = {"K": 64, "N": [40], "bits": 4, "block_size": 32}
    return Node("QuantizedMatMul", {**inputs, "": floats(0), "residual": floats(5, 40)}, attributes, 1)


def product_with_minima() -> Node:
    """64 inputs in 4 bits; scales and minima in 8 bits, a unit for two blocks."""
    inputs: dict[str, npt.NDArray[Any]] = {"x": floats(5, 64)}
    inputs["codes"] = np.random.default_rng(0).integers(0, 256, 3 * 8 * 64, np.uint8)
    blocks, units = np.ones(3 * 4 * 16, np.int8), floats(3 * 2 * 16)
    left_out = {"": units, " ": units, "  ": units}
    inputs |= {"scales": blocks, **left_out, "units": units, "minima": blocks, "minimum_units": units}
    attributes = {"K": 64, "N": [40], "bits": 4, "block_size": 16, "middle": 0}
    return Node("QuantizedMatMul", inputs, attributes, 1)


def experts() -> Node:
    """Two weights of 40 inputs and 20 columns; three tokens choose two each."""
    attributes = {"K": 40, "N": [20], "experts": 2}
    left_out = {"": floats(0), " ": floats(0)}
    chosen = np.array([[0, 1], [1, 0], [1, 1]])
    inputs = {"x": floats(3, 40), "weight": floats(2 * 2 * 40 * 16), **left_out, "chosen": chosen}
    return Node("FloatMatMul", inputs, attributes, 1)


def recurrent_attention() -> Node:
    inputs: dict[str, npt.NDArray[Any]] = {"q": floats(2, 3, 32), "k": floats(2, 3, 32), "v": floats(2, 3, 48)}
    inputs |= {"decay": -np.abs(floats(2, 3, 2)), "state": floats(2, 2, 16, 24), "kept": floats(2, 8, 84)}
    inputs |= {"write": ints(9, 4), "states": ints(6, 4), "keep": ints(10, 4), "beta": floats(2, 3, 2)}
    return Node("RecurrentAttention", inputs, {"scale": 1.0}, 3)


def convolution() -> Node:
    inputs: dict[str, npt.NDArray[Any]] = {"x": floats(2, 3, 20), "weight": floats(4, 20), "past": floats(2, 11, 20)}
    return Node("CausalConvolution", inputs | {"write": ints(9, 4), "states": ints(6, 4), "keep": ints(10, 4)}, {}, 2)


def collective(operator: str) -> Node:
    return Node(operator, {"x": floats(1, 500)}, {"ranks": 3, "number": 7}, 1)


def lookup() -> Node:
    codes = np.random.default_rng(0).integers(0, 256, 3 * 16 * 64, np.uint8)  # 64 inputs in 8 bits.
    inputs = {"ids": ints(0, 39, 16, 2), "codes": codes, "scales": floats(3 * 2 * 16)}
    return Node("EmbeddingLookup", inputs, {"K": 64, "N": [40], "bits": 8, "block_size": 32}, 1)


NODES = {
    "attention": attention(),
    "float product": float_product(),
    "quantized product": quantized_product(False),
    "scales in 16 bits": quantized_product(True),
    "minima": product_with_minima(),
    "experts": experts(),
    "recurrent attention": recurrent_attention(),
    "convolution": convolution(),
    "lookup": lookup(),
    "sum of ranks": collective("AllReduce"),
    "all of ranks": collective("AllGather"),
    "norm": norm(),
    "fused": fused(),
}


WEIGHTS = {"weight", "weight 2", "codes", "scales", "zeros", "units", "minima", "minimum_units"}


def compute(node: Node) -> list[npt.NDArray[Any]]:
    """Run it; the tensors of weights are in the graph, as an engine's are."""
    outputs = [f"y{number}" for number in range(node.outputs)]
    made = helper.make_node(
        node.operator, [*map(str.strip, node.inputs)], outputs, domain=cpu_operators.DOMAIN, **node.attributes
    )
    given = {name: array for name, array in node.inputs.items() if name.strip()}
    kinds = {name: helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in given.items()}
    fed = {name: array for name, array in given.items() if name not in WEIGHTS}
    graph = helper.make_graph(
        [made],
        "damaged",
        [helper.make_tensor_value_info(name, kinds[name], None) for name in fed],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in given.items() if name not in fed],
    )
    imports = [helper.make_opsetid("", 23), helper.make_opsetid(cpu_operators.DOMAIN, cpu_operators.VERSION)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=10)
    _, options = session_options()
    options.enable_cpu_mem_arena = False  # Or what stands behind a tensor would be the arena's own.
    cpu_operators.register(options)
    return [np.asarray(y) for y in ort.InferenceSession(model.SerializeToString(), options).run(None, fed)]


def damaged(node: Node, draw: random.Random) -> Node:
    """The node with one to three lies in it."""
    inputs, attributes = dict(node.inputs), dict(node.attributes)
    for _ in range(draw.randint(1, 3)):
        name = draw.choice([name for name in inputs if name.strip()])
        array = inputs[name]
        match draw.randrange(6):
            case 0 if attributes:
                key = draw.choice([*attributes])
                value = draw.choice(NUMBERS)
                if key == "arguments":
                    attributes[key] = [*attributes[key]]
                    attributes[key][draw.randrange(len(attributes[key]))] = draw.choice([*NUMBERS, *range(-2, 14)])
                elif key == "stages":
                    attributes[key] = draw.choice(["", "Add", "FloatMatMul", "FloatMatMul CachedAttention", "  "])
                elif key.rpartition(".")[2] in ("scale", "epsilon", "softcap"):
                    attributes[key] = draw.choice([0.0, float("nan"), float("inf"), -1e38])
                else:
                    attributes[key] = [value] * draw.randint(0, 5) if key.endswith("N") else value
            case 1:
                kinds = (np.float32, np.float16, np.float64, np.int8, np.uint8, np.uint16, np.int32, np.int64, np.bool_)
                with np.errstate(all="ignore"):
                    inputs[name] = array.astype(draw.choice(kinds))
            case 2 if array.ndim:
                axis = draw.randrange(array.ndim)
                size = draw.choice([0, 1, array.shape[axis] - 1, array.shape[axis] + 1, 2 * array.shape[axis]])
                inputs[name] = np.resize(array, [*array.shape[:axis], size, *array.shape[axis + 1 :]])
            case 3:
                inputs[name] = array.reshape(-1) if draw.random() < 0.5 else array[None]
            case 4 if array.dtype == np.int64 and array.size:
                inputs[name] = array.copy()
                inputs[name].reshape(-1)[draw.randrange(array.size)] = draw.choice(NUMBERS)
            case _:
                inputs[name] = array.swapaxes(0, -1).copy() if array.ndim > 1 else array[::-1].copy()
    return Node(node.operator, inputs, attributes, node.outputs)


@pytest.fixture(autouse=True)
def others() -> Others:
    return Others([floats(1 << 16), floats(1 << 16)])


@pytest.mark.parametrize("node", NODES.values(), ids=list(NODES))
def test_the_node_computes(node: Node) -> None:
    assert all(np.isfinite(y).all() for y in compute(node))


@pytest.mark.parametrize("node", NODES.values(), ids=list(NODES))
def test_a_damaged_graph_is_an_error_or_a_result(node: Node) -> None:
    draw, refused = random.Random(0), 0
    for _ in range(DAMAGES):
        try:
            compute(damaged(node, draw))
        except (RuntimeError, ValueError, TypeError, OverflowError, onnx.checker.ValidationError, *_ERRORS):
            refused += 1
    assert refused > DAMAGES / 10


_ERRORS = tuple(
    getattr(ort.capi.onnxruntime_pybind11_state, name)
    for name in ("InvalidArgument", "Fail", "RuntimeException", "InvalidGraph", "NotImplemented")
)


@pytest.mark.parametrize("name", ["attention", "recurrent attention", "convolution"])
@pytest.mark.parametrize("number", [NEAR_THE_END, 2**63 - 1, 2**62, -1])
def test_positions_near_the_end_of_numbers_are_refused(name: str, number: int) -> None:
    node = NODES[name]
    inputs = {one: array.copy() for one, array in node.inputs.items()}
    if name == "attention":
        inputs["first"][1] = number
    else:
        inputs["write"][1], inputs["states"][1], inputs["keep"][1] = number, number, abs(number)
        inputs["keep"][0] = number
    with pytest.raises(_ERRORS, match="sizes that do not fit"):
        compute(node._replace(inputs=inputs))


@pytest.mark.parametrize("kind", [np.float64, np.int8, np.uint8, np.int32, np.int64])
def test_scales_of_another_type_are_refused(kind: Any) -> None:
    node = NODES["quantized product"]
    inputs = {**node.inputs, "scales": node.inputs["scales"].astype(kind)}
    with pytest.raises(_ERRORS, match="another size or type"):
        compute(node._replace(inputs=inputs))


@pytest.mark.parametrize("operator", ["AllReduce", "AllGather"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_a_graph_for_another_number_of_ranks_is_refused(operator: str, ranks: int) -> None:
    node = collective(operator)
    with pytest.raises(_ERRORS, match="another number of ranks"):
        compute(node._replace(attributes={**node.attributes, "ranks": ranks}))
