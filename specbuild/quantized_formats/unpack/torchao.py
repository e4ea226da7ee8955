"""torchao: tensors flattened into safetensors, described in the files' own headers (nothing is unpickled).

The parameter ``a.weight`` becomes ``a._weight_qdata``, ``a._weight_scale`` and so on; torchao 0.18,
prototype/safetensors/safetensors_support.py.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx_ir as ir

from specbuild.quantized_formats.formats import Form
from specbuild.quantized_formats.unpack import words as unpack
from specbuild.quantized_formats.unpack.scales import (
    activation,
    canonical,
    canonical_shape,
    grid,
    grouped,
    input_factors,
    scales,
)
from specbuild.quantized_formats.unpack.stored import (
    FLOAT8,
    FLOATS,
    INT8,
    UINT8,
    Array,
    CodeTensor,
    Module,
    NumpyTensor,
    in_pairs,
    once,
    outputs_first,
    unpacked_rows,
)
from specbuild.weights.packed import Packed, lazy

SUFFIXES = tuple(f"_weight_{part}" for part in ("qdata", "scale", "zero_point", "act_pre_scale"))


def torchao_unpacked(module: Module, form: Form) -> Packed:
    """Float8Tensor, Int8Tensor and IntxUnpackedToInt8Tensor: ``qdata`` [N, K] float8_e4m3fn or int8, scales by block.

    Four-bit values stand in int8 here; they are packed. quantization/quantize_/workflows of torchao 0.18.
    """
    weight = module.matrix("_weight_qdata", dtypes=(FLOAT8,) if form.bits == 0 else (INT8,))
    shape = weight.shape[1], weight.shape[0]
    form = _whole_dimensions(form, shape)
    kind = {0: ir.DataType.FLOAT8E4M3FN, 4: ir.DataType.INT4, 8: ir.DataType.INT8}[form.bits]

    def four_bits(part: Array) -> Array:
        if (part < -8).any() or (part > 7).any():
            raise module.error(f"{weight.name} holds values that are no four-bit integers")
        return unpack.transposed(part.view(np.uint8) & np.uint8(15))

    rows = outputs_first(weight, 1, four_bits) if form.bits == 4 else unpacked_rows(module, weight)

    return Packed(
        codes=CodeTensor(kind, shape, rows),
        scales=scales(module, module.need("_weight_scale", dtypes=FLOATS), shape, form.block),
        zero_points=_zero_points(module, form, shape, kind),
        block=form.block[1],
        activation=activation(module, form),
        input_factors=input_factors(module, shape[0], "_weight_act_pre_scale"),
    )


def torchao_int4(module: Module, form: Form) -> Packed:
    """Int4Tensor: ``qdata`` [N, K / 2] bytes, the first code in the low half; ``scale``, ``zero_point`` [K / group, N].

    ``zero_point`` is floating point and is added: the weight is ``codes * scale + zero_point``.
    quantization/quantize_/workflows/int4/int4_tensor.py; int4_row_quantize_zp and pack_int4 of FBGEMM.
    """
    weight = module.matrix("_weight_qdata", dtypes=(INT8, UINT8))
    shape = weight.shape[1] * 2, weight.shape[0]
    form = _whole_dimensions(form, shape)
    group = form.block[1]
    offset = module.need("_weight_zero_point", dtypes=FLOATS)
    offsets = grouped(module, offset, shape, group)
    return Packed(
        codes=CodeTensor(ir.DataType.INT4, shape, in_pairs(weight)),
        scales=grouped(module, module.need("_weight_scale", dtypes=FLOATS), shape, group),
        block=group,
        offsets=offsets if offset.read().any() else None,
        activation=activation(module, form),
        input_factors=input_factors(module, shape[0], "_weight_act_pre_scale"),
    )


def _whole_dimensions(form: Form, shape: tuple[int, int]) -> Form:
    """``form`` where a block as large as a dimension is None."""
    outputs, inputs = form.block
    wide, deep = outputs is None or outputs >= shape[1], inputs is None or inputs >= shape[0]
    return replace(form, block=(None if wide and deep else outputs, None if deep else inputs))


def _zero_points(module: Module, form: Form, shape: tuple[int, int], kind: ir.DataType) -> ir.TensorProtocol | None:
    """Zero points by block; None where all are zero, which torchao writes for symmetric weights."""
    tensor: NumpyTensor | None = module.find("_weight_zero_point")
    if tensor is None:
        return None
    module.shaped(tensor, grid(shape, form.block))
    values = module.finite(tensor)
    if not values.any():
        return None
    if tensor.dtype != INT8:
        raise module.error(f"{tensor.name} is {tensor.dtype}, expected integer zero points")
    size, mask = canonical_shape(shape, form.block), np.uint8(15 if form.bits == 4 else 255)
    if not size:
        return lazy(kind, size, lambda: canonical(tensor.read(), shape, form.block))
    return CodeTensor(
        kind, size, once(lambda: np.atleast_2d(canonical(tensor.read(), shape, form.block).astype(np.uint8) & mask))
    )
