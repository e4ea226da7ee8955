"""``FloatMatMul`` beside numpy; and its bits, which depend on a row and a weight alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest

from specbuild.compilers.cpu.formats import prepare
from specbuild.graph import ops as graphs
from tests.helpers.own_products import Form, choose_instruction_set, packed, product_graph, session

SIZES = [(256, 64), (100, 17), (52, 1), (7, 130), (1000, 100), (64, 1100)]
"""[K, N]"""


def numbers(*shape: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(len(shape) + sum(shape)).standard_normal(shape).astype(np.float32)


def product(*weights: npt.NDArray[np.float32], dtype: str = "float32", is_transposed: bool = False) -> ir.Model:
    """x [M, K] times each of the weights [K, N], which are stored in ``dtype``, and as [N, K] if ``is_transposed``."""
    kind = ir.TensorType(ir.DataType.FLOAT)
    x = ir.Value(name="x", type=kind, shape=ir.Shape(["rows", len(weights[0])]))
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": 24})
    for number, weight in enumerate(weights):
        stored = ir.Tensor((weight.T.copy() if is_transposed else weight).astype(dtype))
        matrix = graphs.initializer(graph, f"w{number}", stored)
        if dtype != "float32":
            graph.append(ir.node("Cast", [matrix], {"to": int(ir.DataType.FLOAT)}))
            matrix = graph[-1].outputs[0]
        if is_transposed:
            graph.append(ir.node("Transpose", [matrix], {"perm": [1, 0]}))
            matrix = graph[-1].outputs[0]
        graph.append(ir.node("MatMul", [x, matrix], name=f"product{number}"))
        y = graph[-1].outputs[0]
        y.name, y.type = f"y{number}", kind
        graph.outputs.append(y)
    model = ir.Model(graph, ir_version=10)
    prepare(model)
    assert {node.op_type for node in model.graph} == {"FloatMatMul"}
    return model


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_it_is_the_product_and_bits_depend_on_the_row_alone(size: tuple[int, int], instruction_set: str) -> None:
    """On no other rows, on no number of threads, and not on the processor."""
    weight, x = numbers(*size), numbers(23, size[0])
    model = product(weight)
    choose_instruction_set(None)
    (wanted,) = session(model).run(None, {"x": x})
    sizes = np.abs(x) @ np.abs(weight)
    assert (np.abs(wanted - x.astype(np.float64) @ weight) <= 1e-6 * sizes).all()
    choose_instruction_set(instruction_set)
    for threads in (1, 3):
        opened = session(model, threads)
        for rows in (*range(1, 12), 16, 23):
            for part in (slice(rows), slice(23 - rows, 23)):
                np.testing.assert_array_equal(opened.run(None, {"x": x[part]})[0], wanted[part])


@pytest.mark.parametrize("form", [None, Form("int4", 32), Form("int8", None)], ids=["float32", "int4", "int8"])
def test_without_fused_multiply_adds_bits_depend_on_the_row_alone_too(form: Form | None) -> None:
    """They are other bits than those of other processors."""
    weight, x = numbers(100, 70), numbers(23, 100)
    model = product(weight) if form is None else product_graph(packed(form, 100, 70))
    choose_instruction_set(None)
    (wanted,) = session(model).run(None, {"x": x})
    assert choose_instruction_set("unfused")
    try:
        (found,) = session(model).run(None, {"x": x})
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-4 * np.abs(wanted).max())
        for rows in (1, 2, 3, 5, 9):
            np.testing.assert_array_equal(session(model, 2).run(None, {"x": x[:rows]})[0], found[:rows])
    finally:
        choose_instruction_set(None)


def test_rows_of_nan_are_left_out(instruction_set: str) -> None:
    """As in ``test_quantized_matmul``."""
    weight, x = numbers(70, 40), numbers(23, 70)
    opened = session(product(weight), threads=2)
    (wanted,) = opened.run(None, {"x": x})
    for unused in ([0], [3, 4, 9], [*range(1, 23)], [*range(23)]):
        marked, used = x.copy(), np.delete(np.arange(23), unused)
        marked[unused] = np.nan
        (found,) = opened.run(None, {"x": marked})
        assert np.isnan(found[unused, 0]).all()
        np.testing.assert_array_equal(found[used], wanted[used])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_weights_as_checkpoints_store_them(dtype: str, is_transposed: bool) -> None:
    """Products of one input are one node. float16 is widened, and a tied table transposed, when it is laid out."""
    weights = [numbers(96, columns).astype(dtype).astype(np.float32) for columns in (70, 16, 5)]
    model = product(*weights, dtype=dtype, is_transposed=is_transposed)
    assert [len(node.outputs) for node in model.graph] == [3]
    x = numbers(150, 96)
    for weight, found in zip(weights, session(model, 2).run(None, {"x": x}), strict=True):
        np.testing.assert_allclose(found, x.astype(np.float64) @ weight, atol=1e-4)
        (alone,) = session(product(weight)).run(None, {"x": x[149:]})
        np.testing.assert_array_equal(found[149:], alone)


@pytest.mark.parametrize("wrong", [{"N": [33]}, {"K": 48}, {"made": 1}, {"made": 4}])
def test_sizes_that_contradict_each_other_are_errors(wrong: dict[str, int]) -> None:
    model = product(numbers(64, 20))
    for attribute in ir.convenience.convert_attributes(wrong):
        model.graph[0].attributes.add(attribute)
    with pytest.raises(Exception, match="FloatMatMul"):
        session(model).run(None, {"x": numbers(2, 64)})
