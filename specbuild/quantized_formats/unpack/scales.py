"""Scales, zero points and the order of channels, brought to the shapes of ``Packed``."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from specbuild.quantized_formats.formats import Block, Form
from specbuild.quantized_formats.unpack.stored import EXPONENTS, FLOATS, Array, Module, NumpyTensor
from specbuild.weights.packed import Activation, lazy

_INTEGERS = (np.dtype(np.int32), np.dtype(np.int64))


def grid(shape: tuple[int, int], block: Block) -> tuple[int, int]:
    """How many scales a weight [K, N] has along its output and along its input channels."""
    inputs, outputs = shape
    return -(-outputs // (block[0] or outputs)), -(-inputs // (block[1] or inputs))


def canonical_shape(shape: tuple[int, int], block: Block) -> tuple[int, ...]:
    """The shape that ``Packed`` wants the scales of a weight [K, N] in."""
    if block[1] is not None:
        return grid(shape, block)[1], shape[1]
    return () if block[0] is None else shape[1:]


def canonical(values: Array, shape: tuple[int, int], block: Block) -> Array:
    """Scales or zero points by output and input channel, in the shape that ``Packed`` wants."""
    values = values.reshape(grid(shape, block))
    if block[0] != 1:
        values = np.repeat(values, min(block[0] or shape[1], shape[1]), axis=0)[: shape[1]]
    return values.T.reshape(canonical_shape(shape, block)) if block != (None, None) else values[0, 0]


def scales(module: Module, tensor: NumpyTensor, shape: tuple[int, int], block: Block) -> ir.TensorProtocol:
    """The scales of a weight [K, N] that stand by output and input channel; ones in the shape may be left out.

    Powers of two that are stored as exponents become bfloat16, which holds them all. Raises CheckpointError.
    """
    expected = grid(shape, block)
    if [size for size in tensor.shape if size != 1] != [size for size in expected if size != 1]:
        raise module.error(
            f"{tensor.name} of shape {list(tensor.shape)}, expected {list(expected)} for a weight of {shape[1]} output "
            f"and {shape[0]} input channels"
        )
    exponents = tensor.dtype in EXPONENTS
    dtype = np.dtype(ml_dtypes.bfloat16) if exponents else tensor.dtype

    def values() -> Array:
        return canonical(powers_of_two(module, tensor) if exponents else module.finite(tensor), shape, block)

    return lazy(ir.DataType.from_numpy(dtype), canonical_shape(shape, block), values)


def grouped(module: Module, tensor: NumpyTensor, shape: tuple[int, int], group: int | None) -> ir.TensorProtocol:
    """Scales that stand as [K / group, N] already (AWQ, GPTQ, torchao's INT4). Raises CheckpointError."""
    block: Block = (1, group)
    module.shaped(tensor, tuple(reversed(grid(shape, block))))
    size = canonical_shape(shape, block)
    return lazy(ir.DataType.from_numpy(tensor.dtype), size, lambda: module.finite(tensor).reshape(size))


def powers_of_two(module: Module, tensor: NumpyTensor) -> Array:
    """2^(value - 127) in bfloat16; 255 is NaN. Raises CheckpointError."""
    exponents = tensor.read().view(np.uint8).astype(np.int32)
    if (exponents == 255).any():
        raise module.not_finite(tensor)
    return np.ldexp(np.float32(1), exponents - 127).astype(ml_dtypes.bfloat16)


def require_whole_groups(module: Module, tensor: NumpyTensor, inputs: int, group: int | None) -> None:
    """Raise CheckpointError where groups do not divide the input channels, in formats that know no shorter group."""
    if group is not None and inputs % group:
        raise module.error(f"{tensor.name}: {inputs} input channels, which groups of {group} do not divide")


def channel_order(module: Module, inputs: int, group: int | None, *suffixes: str) -> npt.NDArray[np.int64] | None:
    """[K]: the input channel of each row where groups were made in another order ("act-order"); None: in order.

    The tensor holds the group of each channel. Raises CheckpointError where it is no permutation of whole groups.
    """
    tensor = module.find(*suffixes)
    if tensor is None:
        return None
    module.shaped(module.check(tensor, _INTEGERS), (inputs,))
    groups = tensor.read().astype(np.int64)
    if group is None or (groups == -1).all():  # compressed-tensors wrote -1 where it used no order.
        return None
    expected = np.arange(inputs) // group
    order = np.argsort(groups, kind="stable")
    if not np.array_equal(groups[order], expected):
        raise module.error(f"{tensor.name}: its groups are not {expected[-1] + 1} groups of {group} channels each")
    return None if np.array_equal(groups, expected) else order


def input_factors(module: Module, inputs: int, *suffixes: str) -> npt.NDArray[np.float32] | None:
    """[K]: what the input is multiplied by first, or None. Raises CheckpointError."""
    tensor = module.find(*suffixes)
    if tensor is None:
        return None
    module.check(tensor, FLOATS)
    if math.prod(tensor.shape) != inputs:
        raise module.error(f"{tensor.name} of shape {list(tensor.shape)}, expected {[inputs]}")
    return module.finite(tensor).astype(np.float32).reshape(inputs)


def activation(module: Module, form: Form, *suffixes: str, divides: bool = False) -> Activation | None:
    """How the input is rounded; a static scale is read from the first of ``suffixes`` that is there.

    ``divides``: the stored value is what to multiply by, not the size of a step. Raises CheckpointError.
    """
    if form.activation is None:
        return None
    if not form.static:
        return Activation(form.activation)
    scale = module.scalar(module.need(*suffixes, dtypes=FLOATS))
    return Activation(form.activation, reciprocal(scale) if divides else scale)


def reciprocal(value: float) -> float:
    """1 / ``value``, rounded as float32 is."""
    return float(np.float32(1) / np.float32(value))
