"""``QuantizedMatMul`` beside numpy; and its bits, which depend on a row and a weight alone."""

from __future__ import annotations

import ctypes
import platform
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest

from specbuild.graph import ops as graphs
from specrun import cpu_operators
from specrun.backends.ort_session import import_ort
from tests.helpers.own_products import (
    Form,
    choose_instruction_set,
    expected,
    packed,
    product_graph,
    session,
)

FORMS = {
    "int4 in blocks of 32": Form("int4", 32),
    "int4 in blocks of 128": Form("int4", 128),
    "uint4": Form("uint4", 32),
    "uint4 with zero points": Form("uint4", 32, zeros=True),
    "int8 in blocks of 16": Form("int8", 16),
    "int8 with zero points": Form("int8", 64, zeros=True),
    "uint8": Form("uint8", 64),
    "int8 by channel": Form("int8", None),
    "uint8 by channel, with zero points": Form("uint8", None, zeros=True),
    "int4 by channel": Form("int4", None),
    "int4, scales in 16 bits": Form("int4", 32, scales="bfloat16"),
    "uint4 with zero points, scales in 16 bits": Form("uint4", 32, zeros=True, scales="bfloat16"),
    "int8 by channel, scales in 16 bits": Form("int8", None, scales="bfloat16"),
    "int4, scales in float16": Form("int4", 32, scales="float16"),
    "uint4 with minima (Q4_1)": Form("uint4", 32, scales="float16", minima=True),
    "uint4 with minima in float32": Form("uint4", 64, minima=True),
    "uint4 with minima in 8 bits (Q4_K)": Form("uint4", 32, scales="int8", minima=True, units=8),
    "uint4 in blocks of 16 with minima in 8 bits": Form("uint4", 16, scales="int8", minima=True),
    "int8, scales in 8 bits (Q6_K)": Form("int8", 16, scales="int8", units=16),
    "int8 with minima (Q5_1)": Form("int8", 32, scales="float16", minima=True),
}
SIZES = [(32, 16), (256, 64), (100, 17), (52, 1), (7, 130), (1000, 100)]
"""[K, N]: even ones, and those that fill neither blocks, lines nor panels."""


def inputs(rows: int, width: int) -> npt.NDArray[np.float32]:
    """Rows of different sizes; the second is zero."""
    random = np.random.default_rng(1)
    x = random.standard_normal((rows, width)) * random.uniform(0.01, 100, (rows, 1))
    x[1:2] = 0
    return x.astype(np.float32)


def run(session: Any, x: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    (y,) = session.run(None, {"x": x})
    return np.asarray(y)


@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_it_is_the_product_with_rounded_inputs(form: Form, size: tuple[int, int]) -> None:
    weight = packed(form, *size)
    model = product_graph(weight)
    assert [node.op_type for node in model.graph] == ["QuantizedMatMul"]
    types = {"float32": "FLOAT", "bfloat16": "UINT16", "float16": "FLOAT16", "int8": "INT8"}
    scales = model.graph[0].inputs[2]
    assert scales is not None and scales.dtype is not None and scales.dtype.name == types[form.scales]
    x = inputs(9, size[0])
    wanted = expected(x, weight)
    found = run(session(model), x)
    # Of a row's size, since a sum may cancel.
    sizes = np.abs(x) @ np.abs(weight.dequantize())
    assert (np.abs(found - wanted) <= 1e-6 * sizes).all()


@pytest.mark.parametrize("bits", ["int4", "int8"])
def test_scales_in_16_bits_are_the_same_numbers(bits: str, instruction_set: str) -> None:
    weight = packed(Form(bits, 32, scales="bfloat16"), 128, 40)
    half, whole = product_graph(weight), product_graph(weight)
    (node,) = whole.graph
    codes = node.inputs[2]
    assert codes is not None and codes.const_value is not None and codes.dtype == ir.DataType.UINT16
    scales = (codes.const_value.numpy().astype(np.uint32) << 16).view(np.float32)
    node.replace_input_with(2, graphs.initializer(whole.graph, "scales", ir.tensor(scales)))
    x = inputs(9, 128)
    np.testing.assert_array_equal(run(session(half), x), run(session(whole), x))


@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
def test_a_rows_bits_depend_on_nothing_else(form: Form, instruction_set: str) -> None:
    """On no other rows, on no number of threads, and not on the processor. One size is enough work for threads, and one
    has whole tiles of inputs."""
    for size in [(1000, 100), (520, 300), (70, 5), (640, 100)]:
        model = product_graph(packed(form, *size))
        x = inputs(40, size[0])
        choose_instruction_set(None)
        alone = session(model)
        wanted = np.concatenate([run(alone, row[None]) for row in x])
        choose_instruction_set(instruction_set)
        for threads in (1, 3):
            opened = session(model, threads)
            for rows in (*range(1, 18), 32, 33, 40):
                np.testing.assert_array_equal(run(opened, x[:rows]), wanted[:rows])
                np.testing.assert_array_equal(run(opened, x[-rows:]), wanted[-rows:])


def test_a_prompts_rows_are_those_of_steps() -> None:
    """Which are multiplied some at a time."""
    opened = session(product_graph(packed(Form("int4", 32), 4000, 40), packed(Form("int4", 32), 4000, 9)), 2)
    x = inputs(200, 4000)
    whole = opened.run(None, {"x": x})
    for row in (0, 1, 63, 64, 130, 199):
        for found, alone in zip(whole, opened.run(None, {"x": x[row : row + 1]}), strict=True):
            np.testing.assert_array_equal(found[row], alone[0])


def test_a_row_that_is_not_finite_stays_by_itself(instruction_set: str) -> None:
    opened = session(product_graph(packed(Form("int4", 32), 64, 20)))
    x = inputs(8, 64)
    wanted = run(opened, x)
    for number in (np.nan, np.inf, -np.inf):
        x[3, 40] = number
        found = run(opened, x)
        assert np.isnan(found[3]).all()
        np.testing.assert_array_equal(np.delete(found, 3, 0), np.delete(wanted, 3, 0))


def test_blocks_of_zeros_make_no_subnormal_numbers(instruction_set: str) -> None:
    """Intel's processors need a hundred cycles for a sum with one. Where a result is one, the processor sets a flag."""
    if instruction_set == "plain" or (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        pytest.skip("glibc shows this flag of x86-64's vector instructions")
    libm, all_flags, underflow = ctypes.CDLL("libm.so.6"), 0x3D, 0x10
    opened = session(product_graph(packed(Form("int4", 128), 256, 40)), 1)
    x = inputs(9, 256)
    for numbers, expected_flag in ((0, 0), (1e-37, underflow)):
        x[:, 128:] = numbers
        run(opened, x)
        libm.feclearexcept(all_flags)
        run(opened, x)
        assert libm.fetestexcept(underflow) == expected_flag


def test_rows_of_nan_are_left_out(instruction_set: str) -> None:
    """Unused tokens are. Their first output is NaN, so what reads them leaves them out as well."""
    opened = session(product_graph(packed(Form("int4", 32), 64, 40)))
    x = inputs(70, 64)
    wanted = run(opened, x)
    for unused in ([0], [3, 4, 9], [*range(1, 70)], [*range(70)]):
        marked, used = x.copy(), np.delete(np.arange(70), unused)
        marked[unused] = np.nan
        found = run(opened, marked)
        assert np.isnan(found[unused, 0]).all()
        np.testing.assert_array_equal(found[used], wanted[used])


def test_inputs_of_all_sizes_and_shapes() -> None:
    weight = packed(Form("int8", 16), 16, 4)
    opened = session(product_graph(weight))
    for scale in (1e-38, 1e-30, 1, 1e30):
        x = inputs(3, 16) * np.float32(scale)
        assert np.isfinite(run(opened, x)).all()
    np.testing.assert_array_equal(run(opened, np.zeros((2, 16), np.float32)), np.zeros((2, 4)))
    assert run(opened, np.zeros((0, 16), np.float32)).shape == (0, 4)


def test_products_of_one_input_are_computed_together() -> None:
    """Columns of one do not fill panels. The bits are those of products by themselves."""
    weights = [packed(Form("int4", 32), 96, columns, seed=columns) for columns in (70, 16, 5, 33, 8)]
    model = product_graph(*weights)
    assert [len(node.outputs) for node in model.graph] == [4, 1]
    x = inputs(7, 96)
    together = session(model).run(None, {"x": x})
    for weight, found in zip(weights, together, strict=True):
        np.testing.assert_array_equal(found, run(session(product_graph(weight)), x))


@pytest.mark.parametrize(
    "wrong", [{"N": [33]}, {"N": [20, 1]}, {"K": 96}, {"bits": 8}, {"block_size": 64}, {"block_size": 12}, {"bits": 0}]
)
def test_sizes_that_contradict_each_other_are_errors(wrong: dict[str, Any]) -> None:
    model = product_graph(packed(Form("int4", 32), 64, 20))
    (node,) = model.graph
    for attribute in ir.convenience.convert_attributes(wrong):
        node.attributes.add(attribute)
    with pytest.raises(Exception, match="QuantizedMatMul"):
        run(session(model), inputs(2, 64))


def test_the_library_is_this_packages() -> None:
    assert cpu_operators.is_available()
    assert not cpu_operators.is_available(cpu_operators.VERSION + 1)
    options = import_ort().SessionOptions()
    cpu_operators.register(options)
