"""``Packed`` weights in the format of compressed-tensors, which vLLM and transformers read too.

The library's compressors/pack_quantized, naive_quantized and nvfp4 say how tensors are laid out; its
quantization/quant_args.py and quant_config.py what the configuration holds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import torch

from specbuild.weights.cache_codes import CacheCode
from specbuild.weights.kv_cache import TensorRounding
from specbuild.weights.packed import Packed

Tensors = dict[str, torch.Tensor]
SUFFIXES = (
    *("weight", "weight_packed", "weight_scale", "weight_shape", "weight_global_scale"),
    *("input_scale", "input_global_scale"),
)
"""Suffixes of all tensors that may stand in place of a module's ``weight``."""
_EXPERT = re.compile(r"\.experts\.\d+\.")

_AT_A_TIME = 1 << 22
"""Codes that are put into words at a time."""
_BITS = {ir.DataType.INT8: 8, ir.DataType.INT4: 4, ir.DataType.FLOAT8E4M3FN: 8, ir.DataType.FLOAT4E2M1: 4}


def tensors(packed: Packed) -> Tensors:
    """What stands in place of a module's ``weight``, by suffix. Raises ValueError for what the format does not have."""
    if packed.input_factors is not None or packed.channel_order is not None or packed.offsets is not None:
        raise ValueError("compressed-tensors has no place for factors or the order of inputs, nor for offsets")
    return _weight(packed) | _input(packed)


def _weight(packed: Packed) -> Tensors:
    codes, scales = np.asarray(packed.codes.numpy()).T, _rows(_torch(packed.scales))  # [N, K], [N, K / block]
    inputs, channels = packed.shape
    match packed.codes.dtype:
        case ir.DataType.FLOAT4E2M1:
            assert packed.scale_units is not None
            halves = codes.view(np.uint8)
            return {
                "weight_packed": torch.from_numpy(np.ascontiguousarray(halves[:, ::2] | halves[:, 1::2] << 4)),
                "weight_scale": scales,
                "weight_global_scale": 1 / _torch(packed.scale_units).float().reshape(1),  # It divides.
            }
        case ir.DataType.INT8 | ir.DataType.FLOAT8E4M3FN if packed.block is None:
            stored = torch.from_numpy(np.ascontiguousarray(codes).view(np.int8))
            if packed.codes.dtype == ir.DataType.FLOAT8E4M3FN:
                stored = stored.view(torch.float8_e4m3fn)
            return {"weight": stored, "weight_scale": scales}
        case ir.DataType.INT8 | ir.DataType.INT4:
            return {
                "weight_packed": torch.from_numpy(_words(codes, _BITS[packed.codes.dtype])),
                "weight_scale": scales,
                "weight_shape": torch.tensor([channels, inputs]),
            }
        case other:
            raise ValueError(f"codes in {other.name} have no format in compressed-tensors")


def _input(packed: Packed) -> Tensors:
    """The fixed scale of the input, in the type of the weight's scales."""
    if packed.activation is None or packed.activation.scale is None:
        return {}
    if packed.activation.form == "float4":  # It divides.
        return {"input_global_scale": torch.tensor([1 / packed.activation.scale])}
    return {"input_scale": torch.tensor([packed.activation.scale], dtype=_torch(packed.scales).dtype)}


def _words(codes: npt.NDArray[Any], bits: int) -> npt.NDArray[np.int32]:
    """[N, K] -> int32 [N, K * bits / 32]: codes plus half their range, the first in the lowest bits."""
    per_word = 32 // bits
    channels, inputs = codes.shape
    words = np.zeros((channels, -(-inputs // per_word)), np.uint32)
    step = max(1, _AT_A_TIME // inputs)
    for start in range(0, channels, step):
        rows = slice(start, start + step)
        padded = np.zeros((len(words[rows]), words.shape[1] * per_word), np.uint32)
        padded[:, :inputs] = codes[rows].astype(np.int16) + (1 << (bits - 1))
        parts = padded.reshape(len(padded), -1, per_word) << (np.arange(per_word, dtype=np.uint32) * bits)
        words[rows] = np.bitwise_or.reduce(parts, axis=-1)
    return words.view(np.int32)


def _rows(scales: torch.Tensor) -> torch.Tensor:
    """Scales by output channel; a single one is [1]."""
    return scales.T.contiguous() if scales.dim() == 2 else scales.reshape(-1, 1) if scales.dim() else scales[None]


def _torch(tensor: ir.TensorProtocol) -> torch.Tensor:
    array = np.ascontiguousarray(tensor.numpy())
    for dtype, kind in ((ml_dtypes.bfloat16, torch.bfloat16), (ml_dtypes.float8_e4m3fn, torch.float8_e4m3fn)):
        if array.dtype == dtype:
            return torch.from_numpy(array.view(np.int16 if kind == torch.bfloat16 else np.int8)).view(kind)
    return torch.from_numpy(array)


def cache_scales(rounding: TensorRounding, dtype: CacheCode) -> torch.Tensor:
    """What the codes of keys or values are multiplied by: one scale for float8, one a head for int8."""
    scales = torch.from_numpy(rounding.factors[:, :1, None] * np.float32(rounding.scale))
    return scales if dtype == "int8" else scales.reshape(-1)[:1]


def configuration(modules: Mapping[str, Packed], dense: list[str], kv_cache: CacheCode | None = None) -> dict[str, Any]:
    """``quantization_config`` for ``modules`` by name; ``dense`` names the linear layers that stay as they are."""
    groups: dict[str, dict[str, Any]] = {}
    for name, packed in modules.items():
        group = _group(packed)
        groups.setdefault(str(group), {**group, "targets": []})["targets"].append(name)
    # The largest group is told by the class of its modules, as readers expect it; names go before classes.
    largest = max(groups.values(), key=lambda group: len(group["targets"]))
    for group in groups.values():
        group["targets"] = ["Linear"] if group is largest else targets(group["targets"])
    formats = {group["format"] for group in groups.values()}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "format": formats.pop() if len(formats) == 1 else "mixed-precision",
        "config_groups": {f"group_{number}": group for number, group in enumerate(groups.values())},
        "ignore": dense,
        "kv_cache_scheme": kv_cache and _cache_scheme(kv_cache),
    }


def targets(modules: Iterable[str]) -> list[str]:
    """``modules`` as configurations name them: experts of a layer, which are stored alike, by one pattern."""
    ignored = set()
    for name in modules:
        pattern = r"\.experts\.\d+\.".join(re.escape(part) for part in _EXPERT.split(name))
        ignored.add(f"re:{pattern}$" if _EXPERT.search(name) else name)
    return sorted(ignored, key=lambda name: (name.startswith("re:"), name))


def _cache_scheme(kv_cache: CacheCode) -> dict[str, Any]:
    return {
        "num_bits": 8,
        "type": "int" if kv_cache == "int8" else "float",
        "strategy": "attn_head" if kv_cache == "int8" else "tensor",
        "symmetric": True,
        "dynamic": False,
    }


def _group(packed: Packed) -> dict[str, Any]:
    kind, bits = packed.codes.dtype, _BITS[packed.codes.dtype]
    floating = kind in (ir.DataType.FLOAT8E4M3FN, ir.DataType.FLOAT4E2M1)
    weights: dict[str, Any] = {
        "num_bits": bits,
        "type": "float" if floating else "int",
        "symmetric": True,
        "dynamic": False,
    }
    if kind == ir.DataType.FLOAT4E2M1:
        weights |= {"strategy": "tensor_group", "group_size": packed.block}
        layout = "nvfp4-pack-quantized"
    elif packed.block is not None:
        weights |= {"strategy": "group", "group_size": packed.block}
        layout = "pack-quantized"
    else:
        weights |= {"strategy": "channel" if packed.scales.shape else "tensor"}
        layout = "float-quantized" if floating else "int-quantized" if bits == 8 else "pack-quantized"
    inputs: dict[str, Any] | None = None
    if packed.activation is not None and packed.activation.form == "float4":
        inputs = {**weights, "dynamic": "local"}
    elif packed.activation is not None:
        token = packed.activation.scale is None
        inputs = {
            "num_bits": 8,
            "type": "float" if packed.activation.form == "float8" else "int",
            "symmetric": True,
            "dynamic": token,
            "strategy": "token" if token else "tensor",
        }
    return {"format": layout, "weights": weights, "input_activations": inputs, "output_activations": None}
