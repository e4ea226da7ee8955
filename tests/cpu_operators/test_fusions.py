"""What products take over from the operators before and behind them: the same numbers, in fewer nodes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest

from specbuild.compilers.cpu.formats import prepare
from specbuild.quantization.insert_qdq import quantize_matmul, weighted_matmuls
from tests.helpers.own_products import (
    Form,
    choose_instruction_set,
    mlp,
    packed,
    session,
)

WIDTH, INNER = 96, 200
QUANTIZED = {"int4": Form("int4", 32), "int8": Form("int8", 32)}
FORMS = {"float32": None, **QUANTIZED}


def weights(width: int = WIDTH, inner: int = INNER) -> list[npt.NDArray[np.float32]]:
    random = np.random.default_rng(3)
    shapes = [(width, inner), (width, inner), (inner, width), (width,)]
    return [random.standard_normal(shape).astype(np.float32) / np.float32(np.sqrt(shape[0])) for shape in shapes]


def inputs(batch: int, tokens: int, width: int = WIDTH) -> npt.NDArray[np.float32]:
    x = np.random.default_rng(4).standard_normal((batch, tokens, width)) * 3
    return x.astype(np.float32)


def own(form: Form | None, activation: str = "Sigmoid") -> ir.Model:
    """The layer with our products, quantized where a form is given."""
    model = mlp(weights(), activation)
    if form:
        quantize(model, form)
    prepare(model)
    return model


def quantize(model: ir.Model, form: Form) -> None:
    """Random codes in place of the weights."""
    for number, product in enumerate(weighted_matmuls(model)):
        rows, columns = product.weight.shape.numpy()  # type: ignore[union-attr]
        quantize_matmul(model, product, packed(form, rows, columns, number))


@pytest.mark.parametrize("activation", ["Sigmoid", "Gelu"])
def test_a_layers_second_half_is_two_nodes_and_the_same_numbers(activation: str) -> None:
    model = own(None, activation)
    assert [node.op_type for node in model.graph] == ["FloatMatMul"] * 2
    x = inputs(3, 7)
    (wanted,) = session(mlp(weights(), activation)).run(None, {"x": x})
    (found,) = session(model).run(None, {"x": x})
    np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
def test_a_tokens_bits_depend_on_nothing_else(form: Form | None, instruction_set: str) -> None:
    model = own(form)
    x = inputs(4, 30)
    choose_instruction_set(None)
    alone = session(model)
    wanted = np.concatenate([alone.run(None, {"x": x[row : row + 1, i : i + 1]})[0] for row, i in np.ndindex(4, 30)])
    choose_instruction_set(instruction_set)
    for threads in (1, 3):
        (found,) = session(model, threads).run(None, {"x": x})
        np.testing.assert_array_equal(found.reshape(wanted.shape), wanted)


@pytest.mark.parametrize("form", QUANTIZED.values(), ids=list(QUANTIZED))
def test_quantized_products_round_what_they_make(form: Form) -> None:
    """Beside a graph whose normalization and gate are nodes of their own, since others read them too."""
    fused, plain = own(form), mlp(weights())
    plain.graph.outputs.extend([plain.graph[0].outputs[0], plain.graph[-3].outputs[0]])
    quantize(plain, form)
    prepare(plain)
    assert [node.op_type for node in fused.graph] == ["QuantizedMatMul"] * 2
    assert {"RMSNormalization", "Mul"} <= {node.op_type for node in plain.graph}
    x = inputs(2, 5)
    (found,) = session(fused).run(None, {"x": x})
    wanted = session(plain).run(None, {"x": x})[0]
    # A number that lies between two codes may be rounded to either.
    assert np.abs(found - wanted).max() <= 0.02 * np.abs(wanted).max()
    assert np.abs(found - wanted).mean() <= 1e-3 * np.abs(wanted).mean()


def test_what_others_read_stays_a_node() -> None:
    model = mlp(weights())
    norm = next(node for node in model.graph if node.op_type == "RMSNormalization")
    model.graph.outputs.append(norm.outputs[0])
    prepare(model)
    assert [node.op_type for node in model.graph] == ["RMSNormalization", "FloatMatMul", "FloatMatMul"]
    x = inputs(1, 3)
    found = session(model).run(None, {"x": x})
    wanted = session(mlp(weights())).run(None, {"x": x})
    np.testing.assert_allclose(found[0], wanted[0], atol=1e-5)


def test_a_sum_with_a_bias_is_none_with_the_residual_stream() -> None:
    """A bias has fewer axes than the product."""
    model = mlp(weights())
    add = next(node for node in model.graph if node.op_type == "Add")
    bias: Any = ir.Value(name="bias", const_value=ir.Tensor(np.ones(WIDTH, np.float32)), shape=ir.Shape([WIDTH]))
    model.graph.register_initializer(bias)
    add.replace_input_with(0, bias)
    prepare(model)
    assert [node.op_type for node in model.graph] == ["FloatMatMul", "FloatMatMul", "Add"]


def test_rows_of_many_passes_of_memory() -> None:
    """More rows than are made at a time."""
    model = own(None)
    x = inputs(1, 1500)
    (whole,) = session(model, 2).run(None, {"x": x})
    (last,) = session(model).run(None, {"x": x[:, 1400:]})
    np.testing.assert_array_equal(whole[:, 1400:], last)
