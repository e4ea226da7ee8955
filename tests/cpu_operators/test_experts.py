"""Products by experts' weights: each row has the bits of a product by the weight that it chose."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest

from specbuild.compilers.cpu.experts import OPERATOR
from specbuild.compilers.cpu.formats import prepare
from specbuild.graph import ops as graphs
from specbuild.quantization.insert_qdq import quantize_matmul, weighted_matmuls
from specrun.cpu_operators import DOMAIN
from tests.helpers.own_products import Form, packed, session

EXPERTS, ROWS, COLUMNS = 5, 96, 40
FORMS = {
    "float32": None,
    "int8": Form("int8", None),
    "int4": Form("int4", 32, scales="bfloat16"),
    "uint4 with zeros": Form("uint4", 32, zeros=True),
    "scales in 8 bits": Form("int4", 16, scales="int8", units=2),
}
CHOSEN = np.array([[0, 3], [3, 1], [1, 0], [3, 4], [4, 3], [0, 1], [3, 0]])


def numbers(*shape: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def graph_of(form: Form | None, *experts: int) -> ir.Model:
    """x times the weights of ``experts``: of one for all rows, else of those that the input ``chosen`` says."""
    kind = ir.TensorType(ir.DataType.FLOAT)
    x = ir.Value(name="x", type=kind, shape=ir.Shape(["tokens", ROWS]))
    chosen = ir.Value(name="chosen", type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(["tokens", "k"]))
    graph = ir.Graph([x, chosen] if len(experts) > 1 else [x], [], nodes=[], opset_imports={"": 24, DOMAIN: 1})
    random = np.random.default_rng(0).standard_normal((EXPERTS, ROWS, COLUMNS)).astype(np.float32)
    weights = [graphs.initializer(graph, f"w{expert}", ir.Tensor(random[expert])) for expert in experts]
    products = [ir.node("MatMul", [x, weight], name=f"product{weight.name}") for weight in weights]
    for node in products:
        graph.append(node)
        node.outputs[0].name, node.outputs[0].type = f"y.{node.name}", kind
    graph.outputs.append(products[0].outputs[0])
    model = ir.Model(graph, ir_version=10)
    if form is not None:
        for expert, product in zip(experts, weighted_matmuls(model), strict=True):
            quantize_matmul(model, product, packed(form, ROWS, COLUMNS, seed=expert))
    if len(experts) > 1:
        last = [node for node in graph if node.op_type == "MatMul"]
        own = ir.node(OPERATOR, [x, chosen, *(node.inputs[1] for node in last)], domain=DOMAIN, name="own")
        own.outputs[0].name, own.outputs[0].type = "y", kind
        graph.insert_after(last[-1], own)
        graph.outputs[0] = own.outputs[0]
        for node in last:
            graph.remove(node, safe=True)
    prepare(model)
    return model


@pytest.mark.parametrize("form", FORMS)
def test_a_row_has_the_bits_of_its_experts_product(form: str, instruction_set: str) -> None:
    """Whatever the other rows have chosen. A token's rows share its activations; a row may have its own too."""
    x, opened = numbers(len(CHOSEN), ROWS), session(graph_of(FORMS[form], *range(EXPERTS)), threads=2)
    alone = [session(graph_of(FORMS[form], expert)).run(None, {"x": x})[0] for expert in range(EXPERTS)]
    expected = np.stack([[alone[expert][token] for expert in row] for token, row in enumerate(CHOSEN)])
    for part in (slice(0, 1), slice(2, 5), slice(None)):
        (found,) = opened.run(None, {"x": x[part], "chosen": CHOSEN[part]})
        np.testing.assert_array_equal(found, expected[part])
    each = {"x": np.repeat(x, 2, axis=0), "chosen": CHOSEN}
    np.testing.assert_array_equal(opened.run(None, each)[0], expected)


def test_rows_of_nan_are_left_out() -> None:
    x, opened = numbers(len(CHOSEN), ROWS), session(graph_of(FORMS["int4"], *range(EXPERTS)))
    (wanted,) = opened.run(None, {"x": x, "chosen": CHOSEN})
    x[[1, 4]] = np.nan
    (found,) = opened.run(None, {"x": x, "chosen": CHOSEN})
    assert np.isnan(found[[1, 4], :, 0]).all()
    used = [0, 2, 3, 5, 6]
    np.testing.assert_array_equal(found[used], wanted[used])


@pytest.mark.parametrize("expert", [-1, EXPERTS, 1 << 40])
def test_an_expert_that_is_not_there_is_an_error(expert: int) -> None:
    opened = session(graph_of(None, *range(EXPERTS)))
    with pytest.raises(Exception, match="no such expert"):
        opened.run(None, {"x": numbers(1, ROWS), "chosen": np.array([[0, expert]])})


def test_rows_that_do_not_fit_are_an_error() -> None:
    opened = session(graph_of(None, *range(EXPERTS)))
    with pytest.raises(Exception, match="another size or type"):
        opened.run(None, {"x": numbers(3, ROWS), "chosen": np.array([[0, 1]])})
    (nothing,) = opened.run(None, {"x": numbers(0, ROWS), "chosen": np.zeros((0, 2), np.int64)})
    assert nothing.shape == (0, 2, COLUMNS)


def test_experts_that_are_stored_in_other_ways_are_an_error() -> None:
    model = graph_of(None, 0)
    x, weight = model.graph.inputs[0], graphs.initializer(model.graph, "w", ir.Tensor(numbers(ROWS, COLUMNS)))
    other = graphs.initializer(model.graph, "other", ir.Tensor(numbers(ROWS, COLUMNS + 1)))
    own = ir.node(OPERATOR, [x, x, weight, other], domain=DOMAIN, name="own")
    model.graph.append(own)
    model.graph.outputs.append(own.outputs[0])
    with pytest.raises(ValueError, match="experts differ in how they are stored"):
        prepare(model)
