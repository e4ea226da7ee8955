"""Graphs of one product with a quantized weight, computed by specrun's own CPU operator."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from specbuild.compilers.cpu.formats import prepare
from specbuild.graph import ops as graphs
from specbuild.quantization.insert_qdq import quantize_matmul, weighted_matmuls
from specbuild.weights.packed import Floats, Packed
from specrun import cpu_operators
from specrun.backends.ort_session import session_options


class Form(NamedTuple):
    """How a weight is stored."""

    dtype: str
    block: int | None
    """None: one scale a column."""
    zeros: bool = False
    scales: str = "float32"
    """Whose numbers they are, in float32; int8: codes with units."""
    minima: bool = False
    """Whether there are numbers to add, stored as scales are."""
    units: int | None = None
    """Of scales in int8: how many blocks share one. None: all of them."""


def packed(form: Form, rows: int, columns: int, seed: int = 0) -> Packed:
    """A random weight [rows, columns]."""
    random = np.random.default_rng(seed)
    bits = 4 if form.dtype.endswith("4") else 8
    low, high = (0, 1 << bits) if form.dtype.startswith("u") else (-(1 << bits - 1), 1 << bits - 1)
    kind: Any = getattr(ml_dtypes, form.dtype) if bits == 4 else np.dtype(form.dtype)
    shape = (-(-rows // form.block), columns) if form.block else (columns,)

    def tensor(values: npt.NDArray[Any]) -> ir.TensorProtocol:
        return ir.Tensor(values.astype(kind), dtype=ir.DataType[form.dtype.upper()])

    codes = tensor(random.integers(low, high, (rows, columns)))

    def block_values(low: float, high: float) -> tuple[ir.TensorProtocol, ir.TensorProtocol | None]:
        if form.scales != "int8":
            kind = ml_dtypes.bfloat16 if form.scales == "bfloat16" else np.dtype(form.scales)
            return ir.Tensor(random.uniform(low, high, shape).astype(kind).astype(np.float32)), None
        sizes = (columns,) if form.units is None else (-(-shape[0] // form.units), columns)
        units = random.uniform(high / 256, high / 128, sizes).astype(np.float32)
        return ir.Tensor(random.integers(-128, 128, shape, np.int8)), ir.Tensor(units)

    scales, scale_units = block_values(0.5, 2)
    offsets, offset_units = block_values(-4, 4) if form.minima else (None, None)
    return Packed(
        codes,
        scales,
        tensor(random.integers(low, high, shape)) if form.zeros else None,
        block=form.block,
        scale_units=scale_units,
        offsets=offsets,
        offset_units=offset_units,
    )


def product_graph(*weights: Packed) -> ir.Model:
    """x [M, K] times each of ``weights``, with the operator in it."""
    kind = ir.TensorType(ir.DataType.FLOAT)
    x = ir.Value(name="x", type=kind, shape=ir.Shape(["rows", weights[0].shape[0]]))
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": 24})
    for number, weight in enumerate(weights):
        dense = ir.Tensor(np.zeros(weight.shape, np.float32))
        node = ir.node("MatMul", [x, graphs.initializer(graph, f"w{number}", dense)])
        node.outputs[0].name, node.outputs[0].type = f"y{number}", kind
        graph.append(node)
        graph.outputs.append(node.outputs[0])
    model = ir.Model(graph, ir_version=10)
    for product, weight in zip(weighted_matmuls(model), weights, strict=True):
        quantize_matmul(model, product, weight)
    prepare(model)
    return model


def mlp(weights: Sequence[npt.NDArray[np.float32]], activation: str = "Sigmoid") -> ir.Model:
    """A layer's second half as checkpoints have it: x [B, S, K] -> x + down(activation(gate(norm)) * up(norm)).

    weights: [K, N] of gate and up, [N, K] of down, [K] of the norm. activation: Sigmoid for silu, or Gelu.
    """
    kind, width = ir.TensorType(ir.DataType.FLOAT), len(weights[0])
    x = ir.Value(name="x", type=kind, shape=ir.Shape(["batch", "sequence", width]))
    graph = ir.Graph([x], [], nodes=[], opset_imports={"": 24})

    def add(op_type: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        node = ir.node(op_type, inputs, attributes)
        node.outputs[0].name, node.outputs[0].type = f"{op_type}.{len(graph)}", kind
        graph.append(node)
        return node.outputs[0]

    gate, up, down, scale = (
        graphs.initializer(graph, name, ir.Tensor(weight))
        for name, weight in zip(("gate", "up", "down", "scale"), weights, strict=True)
    )
    norm = add("RMSNormalization", x, scale, axis=-1, epsilon=1e-6, stash_type=1)
    gated = add("MatMul", norm, gate)
    active = (
        add("Gelu", gated, approximate="tanh") if activation == "Gelu" else add("Mul", gated, add(activation, gated))
    )
    both = add("Mul", active, add("MatMul", norm, up))
    graph.outputs.append(add("Add", x, add("MatMul", both, down)))
    return ir.Model(graph, ir_version=10)


def session(model: ir.Model, threads: int = 1) -> Any:
    """A session that has the operator."""
    ort, options = session_options()
    options.intra_op_num_threads = threads
    cpu_operators.register(options)
    return ort.InferenceSession(graphs.to_bytes(model), options, providers=["CPUExecutionProvider"])


def choose_instruction_set(name: str | None) -> bool:
    """Compute with these instructions from now on, None: the best ones; False where this processor lacks them."""
    choose = ctypes.CDLL(str(cpu_operators.library())).specrun_choose_instruction_set
    choose.argtypes, choose.restype = [ctypes.c_char_p], ctypes.c_char_p
    return choose(name.encode() if name else None) is not None


def expected(x: Floats, weight: Packed) -> npt.NDArray[np.float64]:
    """The product as the operator defines it: inputs in 8 bits, one scale for each block of a row."""
    rows, block = len(weight.dequantize()), weight.block or 32
    rounded = np.empty(x.shape)
    for first in range(0, rows, block):
        part = x[:, first : first + block]
        amax = np.maximum(np.abs(part).max(1, keepdims=True), np.float32(2**-119))
        codes = np.rint(part * (np.float32(127) / amax))
        rounded[:, first : first + part.shape[1]] = codes.astype(np.float64) * (amax / np.float32(127))
    return rounded @ weight.dequantize().astype(np.float64)
