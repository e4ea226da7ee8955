"""Weights of quantized checkpoints as ``Packed``: one function a format, chosen by ``Form.reader``.

Only single scales and the order of channels are read here; the rest is read when it is written. Packed weights stay
packed, and scales keep their type and value. Each function names where its format is described. All raise
CheckpointError where tensors are missing or do not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import onnx_ir as ir

from specbuild.quantized_formats.formats import Form
from specbuild.quantized_formats.unpack import words as unpack
from specbuild.quantized_formats.unpack.codebooks import bitsandbytes_4bit, bitsandbytes_8bit
from specbuild.quantized_formats.unpack.gguf import gguf
from specbuild.quantized_formats.unpack.scales import (
    activation,
    canonical,
    canonical_shape,
    channel_order,
    grid,
    grouped,
    input_factors,
    reciprocal,
    require_whole_groups,
    scales,
)
from specbuild.quantized_formats.unpack.stored import (
    EXPONENTS,
    FLOAT8,
    FLOATS,
    INT8,
    INT32,
    INT64,
    UINT8,
    Array,
    CodeTensor,
    Module,
    NumpyTensor,
    Ranges,
    in_pairs,
    once,
    outputs_first,
    unpacked_rows,
)
from specbuild.quantized_formats.unpack.torchao import torchao_int4, torchao_unpacked
from specbuild.weights.gguf_file import BLOCKS
from specbuild.weights.packed import Packed, lazy

_SIGNED = {4: ir.DataType.INT4, 8: ir.DataType.INT8}
_UNSIGNED = {4: ir.DataType.UINT4, 8: ir.DataType.UINT8}
_V1_ZEROS = {4: np.uint32(0x11111111), 8: np.uint32(0x01010101)}


def unpacked(module: Module, form: Form) -> Packed:
    """``weight`` [N, K] in int8 or float8_e4m3fn, ``weight_scale`` by block, ``input_scale`` if static.

    compressed-tensors' naive-, int- and float-quantized (compressors/naive_quantized/base.py), where asymmetric
    weights have an int8 ``weight_zero_point`` like the scales; FP8 of transformers, DeepSeek and Qwen
    (integrations/finegrained_fp8.py: ``weight_scale_inv`` multiplies, whatever its name); fbgemm_fp8; ModelOpt's FP8
    and INT8 with ``pre_quant_scale`` [K] (torch/export/quant_utils.py).
    """
    weight = module.matrix("weight", dtypes=(FLOAT8 if form.reader == "float8" else INT8,))
    kind = ir.DataType.from_numpy(weight.dtype)
    shape = weight.shape[1], weight.shape[0]
    scale = module.need("weight_scale_inv", "weight_scale", dtypes=FLOATS + EXPONENTS)
    zero_points = None
    if not form.symmetric:
        zeros = module.shaped(module.need("weight_zero_point", dtypes=(INT8,)), grid(shape, form.block))
        size = canonical_shape(shape, form.block)
        zero_points = lazy(kind, size, lambda: canonical(zeros.read(), shape, form.block))
    return Packed(
        codes=CodeTensor(kind, shape, unpacked_rows(module, weight)),
        scales=scales(module, scale, shape, form.block),
        zero_points=zero_points,
        block=form.block[1],
        activation=activation(module, form, "input_scale", "activation_scale"),
        input_factors=input_factors(module, shape[0], "pre_quant_scale"),
    )


def pack_quantized(module: Module, form: Form) -> Packed:
    """compressed-tensors' pack-quantized: ``weight_packed`` int32 [N, K * bits / 32], low bits first along K.

    Codes are stored plus 2^(bits - 1). ``weight_shape`` is [N, K]; ``weight_zero_point`` int32 [N * bits / 32,
    K / group] is packed along N; ``weight_g_idx`` [K] is the group of each channel (actorder "group", until version
    0.19). compressors/pack_quantized/helpers.py.
    """
    stored = module.matrix("weight_packed", dtypes=(INT32,))
    shape = _unpacked_shape(module, stored, form.bits)
    group, flip = form.block[1], np.uint8(2 ** (form.bits - 1))
    require_whole_groups(module, stored, shape[0], group)
    order = channel_order(module, shape[0], group, "weight_g_idx")
    kind, zero_points = _SIGNED[form.bits], None
    if not form.symmetric:
        kind, flip = _UNSIGNED[form.bits], np.uint8(0)
        zeros = module.need("weight_zero_point", dtypes=(INT32,))
        module.shaped(zeros, (-(-shape[1] * form.bits // 32), grid(shape, form.block)[1]))
        zero_points = CodeTensor(
            kind,
            canonical_shape(shape, form.block),
            once(lambda: unpack.along(zeros.read().T, form.bits)[:, : shape[1]]),
        )

    def reordered(ranges: Ranges) -> Iterator[Array]:
        words = unpack.transposed(unpack.as_bytes(stored.read()))
        for start, stop in ranges:
            yield unpack.chosen(words, form.bits, channels[start:stop]) ^ flip

    channels = np.arange(shape[0]) if order is None else order
    in_order = outputs_first(stored, 32 // form.bits, lambda part: unpack.by_output(part, form.bits) ^ flip)
    return Packed(
        codes=CodeTensor(kind, shape, in_order if order is None else reordered),
        scales=scales(module, module.need("weight_scale", dtypes=FLOATS), shape, form.block),
        zero_points=zero_points,
        block=group,
        activation=activation(module, form, "input_scale"),
        channel_order=order,
    )


def awq(module: Module, form: Form) -> Packed:
    """AWQ's gemm: ``qweight`` int32 [K, N / 8], ``qzeros`` int32 [K / group, N / 8], ``scales`` [K / group, N].

    The columns of a word are interleaved. AutoAWQ 0.2.9: awq/modules/linear/gemm.py, awq/utils/packing_utils.py.
    """
    stored = module.matrix("qweight", dtypes=(INT32,))
    shape, group = (stored.shape[0], stored.shape[1] * 8), form.block[1]
    require_whole_groups(module, stored, shape[0], group)
    zeros = module.shaped(module.need("qzeros", dtypes=(INT32,)), (grid(shape, form.block)[1], stored.shape[1]))

    def codes(ranges: Ranges) -> Iterator[Array]:
        for start, stop in ranges:
            yield unpack.awq(stored.read((slice(start, stop), slice(None))))

    return Packed(
        codes=CodeTensor(ir.DataType.UINT4, shape, codes),
        scales=grouped(module, module.need("scales", dtypes=FLOATS), shape, group),
        zero_points=CodeTensor(
            ir.DataType.UINT4, canonical_shape(shape, form.block), once(lambda: unpack.awq(zeros.read()))
        ),
        block=group,
    )


def gptq(module: Module, form: Form) -> Packed:
    """GPTQ: ``qweight`` int32 [K * bits / 32, N], ``scales`` [K / group, N].

    ``g_idx`` [K] is the group of each channel. ``qzeros`` int32 [K / group, N * bits / 32] holds the zero points in
    format gptq_v2, and one less in format gptq: there 1 is added to whole words, as GPT-QModel does. Symmetric weights
    have all zero points in the middle and become signed codes. GPT-QModel 7.7: nn_modules/qlinear/__init__.py,
    utils/model.py.
    """
    stored = module.matrix("qweight", dtypes=(INT32,))
    bits, group = form.bits, form.block[1]
    index = module.find("g_idx")
    inputs = index.shape[0] if index is not None and len(index.shape) == 1 else stored.shape[0] * 32 // bits
    shape = inputs, stored.shape[1]
    module.shaped(stored, (-(-inputs * bits // 32), shape[1]))
    groups, middle = grid(shape, form.block)[1], np.uint8(2 ** (bits - 1))
    packed_zeros = module.shaped(module.need("qzeros", dtypes=(INT32,)), (groups, -(-shape[1] * bits // 32)))
    order = channel_order(module, inputs, group, "g_idx")
    stored_scales = grouped(module, module.need("scales", dtypes=FLOATS), shape, group)

    def zeros() -> Array:
        words = packed_zeros.read().view(np.uint32)
        if form.reader == "gptq":
            words = words + _V1_ZEROS[bits]
        return unpack.along(words, bits)[:, : shape[1]]

    def checked_scales() -> Array:
        if (zeros() != middle).any():
            raise module.error(f"{packed_zeros.name}: sym is true, and yet there are zero points other than {middle}")
        return stored_scales.numpy()

    def in_order(ranges: Ranges) -> Iterator[Array]:
        for start, stop in ranges:
            words = stored.read((slice(start * bits // 32, -(-stop * bits // 32)), slice(None)))
            yield unpack.by_input(words, bits)[: stop - start] ^ flip

    def reordered(ranges: Ranges) -> Iterator[Array]:
        words = stored.read()
        for start, stop in ranges:
            yield unpack.chosen(words, bits, channels[start:stop]) ^ flip

    channels = np.arange(inputs) if order is None else order
    flip = middle if form.symmetric else np.uint8(0)
    kind = (_SIGNED if form.symmetric else _UNSIGNED)[bits]
    size = canonical_shape(shape, form.block)
    return Packed(
        codes=CodeTensor(kind, shape, in_order if order is None else reordered),
        scales=lazy(stored_scales.dtype, size, checked_scales) if form.symmetric else stored_scales,
        zero_points=None if form.symmetric else CodeTensor(kind, size, once(zeros)),
        block=group,
        channel_order=order,
    )


def float4(module: Module, form: Form) -> Packed:
    """FP4 (E2M1): two codes a byte [N, K / 2], the first in the low half, ``weight_scale`` [N, K / group].

    NVFP4: groups of 16, scales in float8_e4m3fn and one for the whole tensor, by which compressed-tensors divides
    (``weight_packed``, ``weight_global_scale``, ``input_global_scale``; compressors/nvfp4) and ModelOpt multiplies
    (``weight``, ``weight_scale_2``, ``input_scale``; torch/quantization/qtensor/nvfp4_tensor.py). MXFP4: groups of 32
    whose scales are powers of two (compressors/mxfp4).
    """
    stored = module.matrix("weight_packed", "weight", dtypes=(UINT8,))
    shape = stored.shape[1] * 2, stored.shape[0]
    group = form.block[1]
    require_whole_groups(module, stored, shape[0], group)
    divides = module.find("weight_packed") is not None  # compressed-tensors.
    global_scale = None
    if form.reader == "nvfp4":
        suffix = "weight_global_scale" if divides else "weight_scale_2"
        stored_scale = module.scalar(module.need(suffix, dtypes=FLOATS))
        global_scale = ir.tensor(np.float32(reciprocal(stored_scale) if divides else stored_scale))
    scale = module.need("weight_scale", dtypes=(FLOAT8,) if form.reader == "nvfp4" else EXPONENTS)
    input_suffix = "input_global_scale" if divides else "input_scale"
    return Packed(
        codes=CodeTensor(ir.DataType.FLOAT4E2M1, shape, in_pairs(stored)),
        scales=scales(module, scale, shape, form.block),
        block=group,
        scale_units=global_scale,
        activation=activation(module, form, input_suffix, divides=divides),
        input_factors=input_factors(module, shape[0], "pre_quant_scale"),
    )


def modelopt_int4(module: Module, form: Form) -> Packed:
    """ModelOpt's INT4 AWQ: ``weight`` uint8 [N / 2, K], ``weight_scale`` [N, K / group], ``pre_quant_scale`` [K].

    A byte holds output channel 2n in its low half and 2n + 1 in its high half, in two's complement.
    torch/export/quant_utils.py, pack_int4_in_uint8.
    """
    stored = module.matrix("weight", dtypes=(UINT8,))
    shape = stored.shape[1], stored.shape[0] * 2
    require_whole_groups(module, stored, shape[0], form.block[1])

    def codes(part: Array) -> Array:
        return unpack.along(unpack.transposed(part), 4)

    return Packed(
        codes=CodeTensor(ir.DataType.INT4, shape, outputs_first(stored, 1, codes)),
        scales=scales(module, module.need("weight_scale", dtypes=FLOATS), shape, form.block),
        block=form.block[1],
        input_factors=input_factors(module, shape[0], "pre_quant_scale"),
    )


def _unpacked_shape(module: Module, packed: NumpyTensor, bits: int) -> tuple[int, int]:
    """[K, N] of a weight that is packed along K."""
    stated = module.find("weight_shape")
    if stated is None:
        return packed.shape[1] * 32 // bits, packed.shape[0]
    module.shaped(module.check(stated, (INT64, INT32)), (2,))
    outputs, inputs = (int(size) for size in stated.read())
    if inputs < 1 or (outputs, -(-inputs * bits // 32)) != packed.shape:
        raise module.error(
            f"{packed.name} of shape {list(packed.shape)}, and {stated.name} says {[outputs, inputs]} in {bits} bits"
        )
    return inputs, outputs


READERS: dict[str, Callable[[Module, Form], Packed]] = {
    "int8": unpacked,
    "float8": unpacked,
    "pack-quantized": pack_quantized,
    "awq": awq,
    "gptq": gptq,
    "gptq_v2": gptq,
    "nvfp4": float4,
    "mxfp4": float4,
    "modelopt-int4": modelopt_int4,
    "bitsandbytes-4bit": bitsandbytes_4bit,
    "bitsandbytes-8bit": bitsandbytes_8bit,
    **dict.fromkeys(BLOCKS, gguf),
    "torchao": torchao_unpacked,
    "torchao-int4": torchao_int4,
}
