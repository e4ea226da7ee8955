#!/usr/bin/env python3
"""Write tests/vectors: small weights as the libraries of the quantized formats pack them, and what they make of them.

    python -m venv /tmp/quant && /tmp/quant/bin/pip install torch==2.13.0 transformers==5.23.0 safetensors \
        compressed-tensors==0.20.0 bitsandbytes==0.50.2 torchao==0.18.0 nvidia-modelopt==0.47.0 accelerate
    PYTHONPATH=AWQ:GPTQ /tmp/quant/bin/python scripts/make_quantized_vectors.py tests/vectors [NAME..]

AWQ and GPTQ are the unpacked source packages of autoawq 0.2.9 and gptqmodel 7.7.0, which are not built.
compressed-tensors 0.10.2 is the last but few that wrote act-order: ``ct-actorder`` needs it in place of 0.20.0.

A file holds tensors by their names in a checkpoint, and ``expected.MODULE``, the library's dequantized weight [N, K].
Its metadata hold the configuration and the library with its version. The tests need none of these libraries.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]


class Vector(NamedTuple):
    """A module or two of a checkpoint."""

    config: dict[str, Any]
    tensors: Tensors
    expected: Tensors
    library: str
    header: dict[str, str] = {}  # noqa: RUF012 -- Never changed.
    file: str = "config.json"


def weight(outputs: int, inputs: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> torch.Tensor:
    """[N, K], every input channel with a size of its own."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.rand(inputs, generator=generator) + 0.1
    return (torch.randn(outputs, inputs, generator=generator) * sizes * 0.1).to(dtype)


def prefixed(module: str, tensors: Tensors) -> Tensors:
    """``tensors`` by their names in a checkpoint."""
    return {f"{module}.{name}": tensor for name, tensor in tensors.items()}


def compressed(outputs: int, inputs: int, format: str, weights: dict[str, Any], **scheme: Any) -> Vector:
    """compressed-tensors: quantized by its own observers' rule (largest value), packed and unpacked by the library."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(**weights)
    setting = QuantizationScheme(targets=["Linear"], weights=args, format=format, **scheme)
    dense = weight(outputs, inputs)
    blocks = _blocks(dense, args)
    low, high = blocks.amin((1, 3)), blocks.amax((1, 3))
    state: Tensors = {"weight": dense}
    if format == "nvfp4-pack-quantized":
        state["weight_global_scale"] = (448 * 6 / dense.abs().max().float()).reshape(1)
    scale, zero = calculate_qparams(low, high, args, global_scale=state.get("weight_global_scale"))
    if args.strategy == "tensor":
        scale, zero = scale.reshape(1), zero.reshape(1)
    state |= {"weight_scale": scale, "weight_zero_point": zero}
    inputs_of = setting.input_activations
    if inputs_of is not None and format == "nvfp4-pack-quantized":
        state["input_global_scale"] = torch.tensor([123.5])
    elif inputs_of is not None and not inputs_of.dynamic:
        state["input_scale"] = torch.tensor([0.0123], dtype=torch.bfloat16)
    compressor = BaseCompressor.get_value_from_registry(format)
    packed = compressor.compress(state, setting)
    result = compressor.decompress(packed, setting)["weight"]
    config = QuantizationConfig(
        config_groups={"group_0": setting}, format=format, ignore=["lm_head"], quantization_status="compressed"
    )
    values = json.loads(config.model_dump_json())
    packed = {name: tensor.data.contiguous() for name, tensor in packed.items()}
    return Vector(
        {"quantization_config": values},
        prefixed("model.layers.0.mlp.up_proj", packed),
        {"model.layers.0.mlp.up_proj": result},
        f"compressed-tensors {version('compressed-tensors')}, {compressor.__name__}",
    )


def _blocks(dense: torch.Tensor, args: Any) -> torch.Tensor:
    """[row blocks, rows, column blocks, columns] of the weight, padded with zeros."""
    rows, columns = dense.shape
    sizes = {"tensor": (rows, columns), "channel": (1, columns), "block": args.block_structure}
    height, width = sizes.get(args.strategy, (1, args.group_size))
    padded = torch.nn.functional.pad(dense, (0, -columns % width, 0, -rows % height))
    return padded.reshape(-(-rows // height), height, -(-columns // width), width)


def act_order() -> Vector:
    """compressed-tensors 0.10.2, whose weights may have groups in another order."""
    from compressed_tensors.compressors.quantized_compressors.pack_quantized import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(num_bits=4, strategy="group", group_size=32, actorder="group")
    dense = weight(16, 96)
    group = torch.arange(96)[torch.randperm(96, generator=torch.Generator().manual_seed(1))] // 32
    grouped = dense[:, torch.argsort(group, stable=True)].reshape(16, 3, 32)
    scale, zero = calculate_qparams(grouped.amin(-1), grouped.amax(-1), args)
    compressor = PackedQuantizationCompressor()
    packed = compressor.compress_weight(dense, scale, args, zero_point=zero, g_idx=group.to(torch.int32))
    packed |= {"weight_scale": scale, "weight_g_idx": group.to(torch.int32)}
    setting = QuantizationScheme(targets=["re:.*proj$"], weights=args)
    config = QuantizationConfig(config_groups={"group_0": setting}, format="pack-quantized", ignore=["lm_head"])
    return Vector(
        {"quantization_config": json.loads(config.model_dump_json())},
        prefixed("model.layers.0.mlp.up_proj", packed),
        {"model.layers.0.mlp.up_proj": compressor.decompress_weight(packed, args)},
        f"compressed-tensors {version('compressed-tensors')}, PackedQuantizationCompressor",
    )


def fp8_blocks(outputs: int, inputs: int, block: tuple[int, int] | None) -> Vector:
    """FP8 of transformers, whose way back is ``_dequantize_fp8_weight``."""
    from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

    dense = weight(outputs, inputs, torch.float32)
    height, width = block or (outputs, inputs)
    padded = torch.nn.functional.pad(dense, (0, -inputs % width, 0, -outputs % height))
    largest = padded.reshape(padded.shape[0] // height, height, -1, width).abs().amax((1, 3))
    scale = largest / 448 if block else (largest / 448).reshape(())
    spread = (largest / 448).repeat_interleave(height, 0).repeat_interleave(width, 1)[:outputs, :inputs]
    stored = (dense / spread).to(torch.float8_e4m3fn)
    tensors = {"weight": stored, "weight_scale_inv": scale}
    config: dict[str, Any] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic" if block else "static",
        "weight_block_size": list(block) if block else None,
        "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"],
    }
    if block is None:
        tensors["activation_scale"] = torch.tensor(0.0345)
    result = _dequantize_fp8_weight(stored, scale, list(block) if block else None, torch.float32)
    return Vector(
        {"quantization_config": config},
        prefixed("model.layers.0.mlp.gate_proj", tensors),
        {"model.layers.0.mlp.gate_proj": result},
        f"transformers {version('transformers')}, _dequantize_fp8_weight",
    )


def fbgemm() -> Vector:
    """By hand: transformers.integrations.fbgemm_fp8.FbgemmFp8Linear stores weight [N, K] and weight_scale [N, 1]."""
    dense = weight(24, 48, torch.float32)
    scale = dense.abs().amax(1, keepdim=True) / 448
    stored = (dense / scale).to(torch.float8_e4m3fn)
    return Vector(
        {"quantization_config": {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}},
        prefixed("model.layers.0.mlp.up_proj", {"weight": stored, "weight_scale": scale}),
        {"model.layers.0.mlp.up_proj": stored.float() * scale},
        f"by hand from transformers {version('transformers')}, integrations/fbgemm_fp8.py",
    )


def mxfp4() -> Vector:
    """gpt-oss's experts; transformers' ``convert_moe_packed_tensors`` gives [E, K, N]."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (3, 10, 2, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(110, 135, (3, 10, 2), generator=generator, dtype=torch.uint8)
    module = "model.layers.0.mlp.experts.gate_up_proj"
    return Vector(
        {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}},
        {f"{module}_blocks": blocks, f"{module}_scales": scales},
        {module: convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2).contiguous()},
        f"transformers {version('transformers')}, convert_moe_packed_tensors",
    )


def _groups(dense: torch.Tensor, group: int, bits: int, symmetric: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zero points [N, K / group] of unsigned codes; the last group may be shorter."""
    parts = dense.float().split(group, 1)
    low = torch.stack([part.amin(1) for part in parts], 1).clamp(max=0)
    high = torch.stack([part.amax(1) for part in parts], 1).clamp(min=0)
    most = 2**bits - 1
    if symmetric:
        scale = torch.maximum(low.abs(), high) * 2 / most
        return scale.half(), torch.full_like(scale, 2 ** (bits - 1))
    scale = ((high - low) / most).half()
    return scale, (-low / scale).round().clamp(0, most)


def awq() -> Vector:
    """AutoAWQ's WQLinear_GEMM and dequantize_gemm."""
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    linear = torch.nn.Linear(96, 32, bias=False, dtype=torch.float16)
    dense = weight(32, 96, torch.float16)
    scale, zero = _groups(dense, 32, 4, symmetric=False)
    spread, zeros = scale.repeat_interleave(32, 1), zero.repeat_interleave(32, 1)
    linear.weight.data = (((dense / spread).round() + zeros).clamp(0, 15) - zeros).half() * spread
    module = WQLinear_GEMM.from_linear(linear, 4, 32, scales=scale.T.contiguous(), zeros=zero.T.contiguous())
    tensors = {name: getattr(module, name) for name in ("qweight", "qzeros", "scales")}
    result = dequantize_gemm(module.qweight, module.qzeros, module.scales, 4, 32).T.contiguous()
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
    return Vector(
        {"quantization_config": config},
        prefixed("model.layers.0.mlp.up_proj", tensors),
        {"model.layers.0.mlp.up_proj": result},
        "autoawq 0.2.9, WQLinear_GEMM and dequantize_gemm",
    )


def gptq(outputs: int, inputs: int, bits: int, group: int, symmetric: bool, desc_act: bool, v1: bool) -> Vector:
    """GPT-QModel's TorchLinear: ``pack_original`` and ``dequantize_weight``."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module, convert_gptq_v2_to_v1_format_module

    size = inputs if group == -1 else group
    dense = weight(outputs, inputs, torch.float16)
    order = torch.randperm(inputs, generator=torch.Generator().manual_seed(2)) if desc_act else torch.arange(inputs)
    first = order[:size]
    dense[:8, first] = dense[:8, first].abs()  # Zero points of 0, which borrow from their neighbours in format gptq.
    scale, zero = _groups(dense[:, order], size, bits, symmetric)
    index = torch.empty(inputs, dtype=torch.int32)
    index[order] = (torch.arange(inputs) // size).to(torch.int32)
    linear = torch.nn.Linear(inputs, outputs, bias=False, dtype=torch.float16)
    linear.weight.data = dense
    module = TorchLinear(bits, group, symmetric, desc_act, inputs, outputs, register_buffers=True)
    module.pack_original(linear, scale, zero, index)
    if v1:
        from gptqmodel.quantization.config import QuantizeConfig

        convert_gptq_v2_to_v1_format_module(module, QuantizeConfig(bits=bits, group_size=group, sym=symmetric))
    tensors = {name: getattr(module, name).clone() for name in ("qweight", "qzeros", "scales", "g_idx")}
    if v1:
        convert_gptq_v1_to_v2_format_module(module, bits, torch.int32)
    module.post_init()
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": group,
        "sym": symmetric,
        "desc_act": desc_act,
        "checkpoint_format": "gptq" if v1 else "gptq_v2",
        "lm_head": False,
    }
    return Vector(
        {"quantization_config": config},
        prefixed("model.layers.0.mlp.up_proj", tensors),
        {"model.layers.0.mlp.up_proj": module.dequantize_weight().T.contiguous()},
        "gptqmodel 7.7.0, TorchLinear",
    )


def bitsandbytes_4bit(outputs: int, inputs: int, table: str, double: bool, block: int = 64) -> Vector:
    """bitsandbytes' quantize_4bit and dequantize_4bit, as its modules save them."""
    from bitsandbytes import functional

    dense = weight(outputs, inputs, torch.float32)
    stored, state = functional.quantize_4bit(dense, blocksize=block, compress_statistics=double, quant_type=table)
    tensors = {"weight": stored, **prefixed("weight", state.as_dict(packed=True))}
    config = {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "load_in_8bit": False,
        "bnb_4bit_quant_type": table,
        "bnb_4bit_use_double_quant": double,
        "llm_int8_skip_modules": ["lm_head"],
    }
    return Vector(
        {"quantization_config": config},
        prefixed("model.layers.0.mlp.up_proj", tensors),
        {"model.layers.0.mlp.up_proj": functional.dequantize_4bit(stored, state)},
        f"bitsandbytes {version('bitsandbytes')}, functional.dequantize_4bit",
    )


def bitsandbytes_8bit() -> Vector:
    """LLM.int8 as Linear8bitLt saves it."""
    from bitsandbytes import functional

    stored, largest, _ = functional.int8_vectorwise_quant(weight(24, 40, torch.float16))
    tensors = {"weight": stored, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    config = {"quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True, "llm_int8_threshold": 6.0}
    return Vector(
        {"quantization_config": config},
        prefixed("model.layers.0.mlp.up_proj", tensors),
        {"model.layers.0.mlp.up_proj": functional.int8_vectorwise_dequant(stored, largest)},
        f"bitsandbytes {version('bitsandbytes')}, functional.int8_vectorwise_dequant",
    )


def torchao(make: Callable[[], Any], outputs: int = 24, inputs: int = 96, dtype: Any = torch.bfloat16) -> Vector:
    """torchao's quantize_, flattened for safetensors as transformers does."""
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import quantize_

    linear = torch.nn.Linear(inputs, outputs, bias=False, dtype=dtype)
    linear.weight.data = weight(outputs, inputs, dtype)
    quantize_(linear, make())
    module = "model.layers.0.mlp.up_proj"
    tensors, header = flatten_tensor_state_dict({f"{module}.weight": linear.weight.data})
    return Vector(
        {"quantization_config": {"quant_method": "torchao", "quant_type": {"default": {}}}},
        tensors,
        {module: linear.weight.dequantize()},
        f"torchao {version('torchao')}, {type(linear.weight.data).__name__}",
        header,
    )


def torchao_int4() -> Vector:
    """By hand: mslk's kernels do not install on a CPU. FBGEMM: int4_row_quantize_zp and pack_int4, which wrote it."""
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import Int4Tensor

    dense = weight(24, 96, torch.float32)
    blocks = dense.reshape(24, 3, 32)
    low = blocks.amin(-1)
    scale = ((blocks.amax(-1) - low) / 15).bfloat16()
    zero = (low + scale * 8).bfloat16()
    codes = ((blocks - low[..., None]) / scale[..., None]).round().clamp(0, 15).to(torch.int8).reshape(24, 96) - 8
    packed = codes[:, ::2] & 15 | codes[:, 1::2] << 4
    tensor = Int4Tensor(packed, scale.T.contiguous(), zero.T.contiguous(), [1, 32], dense.shape)
    module = "model.layers.0.mlp.up_proj"
    tensors, header = flatten_tensor_state_dict({f"{module}.weight": tensor})
    spread = scale.float().repeat_interleave(32, 1), zero.float().repeat_interleave(32, 1)
    return Vector(
        {"quantization_config": {"quant_method": "torchao", "quant_type": {"default": {}}}},
        tensors,
        {module: codes * spread[0] + spread[1]},
        f"torchao {version('torchao')}, Int4Tensor; values by hand from FBGEMM's int4_row_quantize_zp and pack_int4",
        header,
    )


def torchao_dynamic() -> Vector:
    """torchao's Float8Tensor with one scale, as Float8DynamicActivationFloat8WeightConfig makes it on a GPU."""
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict
    from torchao.quantization import Float8Tensor, PerTensor
    from torchao.quantization.quantize_.workflows import QuantizeTensorToFloat8Kwargs

    options = QuantizeTensorToFloat8Kwargs(granularity=PerTensor())
    tensor = Float8Tensor.from_hp(weight(24, 96), granularity=PerTensor(), act_quant_kwargs=options)
    module = "model.layers.0.mlp.up_proj"
    tensors, header = flatten_tensor_state_dict({f"{module}.weight": tensor})
    return Vector(
        {"quantization_config": {"quant_method": "torchao", "quant_type": {"default": {}}}},
        tensors,
        {module: tensor.dequantize()},
        f"torchao {version('torchao')}, Float8Tensor",
        header,
    )


def modelopt(name: str) -> Vector:
    """ModelOpt's own export of a small Llama, dequantized by its tensor classes."""
    import copy
    import tempfile

    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint
    from modelopt.torch.quantization.qtensor import FP8QTensor, INT8QTensor
    from safetensors.torch import load_file
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2
    )
    config.architectures = ["LlamaForCausalLM"]
    model: Any = LlamaForCausalLM(config)
    model.to(torch.bfloat16)
    setting = copy.deepcopy(getattr(mtq, name))
    for entry in setting["quant_cfg"]:
        if "block_sizes" in entry.get("cfg", {}):
            entry["cfg"]["block_sizes"][-1] = 32
    mtq.quantize(model, setting, lambda model: model(torch.arange(48).reshape(1, 48)))
    module = "model.layers.0.mlp.down_proj"
    dense = model.get_submodule(module).weight.detach().clone()
    with tempfile.TemporaryDirectory() as directory, torch.no_grad():
        export_hf_checkpoint(model, export_dir=directory)
        tensors = load_file(Path(directory, "model.safetensors"))
        described = json.loads(Path(directory, "hf_quant_config.json").read_text())
    kept = {key: tensor for key, tensor in tensors.items() if key.startswith(f"{module}.")}
    stored, scale = tensors[f"{module}.weight"], tensors[f"{module}.weight_scale"]
    if name == "FP8_DEFAULT_CFG":
        result = FP8QTensor(dense.shape, torch.float32, stored).dequantize(torch.float32, scale=scale)
    elif name == "INT8_SMOOTHQUANT_CFG":
        result = INT8QTensor(dense.shape, torch.float32, stored).dequantize(torch.float32, scale=scale[:, None])
    else:  # It has no way back; these are the codes that pack_int4_in_uint8 packs.
        spread = scale.repeat_interleave(32, 1)
        result = (dense / spread).round().clamp(-8, 7) * spread
    factors = tensors.get(f"{module}.pre_quant_scale", torch.ones(())).float()
    return Vector(
        described,
        kept,
        {module: result * factors},
        f"nvidia-modelopt {version('nvidia-modelopt')}, export_hf_checkpoint, FP8QTensor, INT8QTensor",
        file="hf_quant_config.json",
    )


def modelopt_nvfp4() -> Vector:
    """ModelOpt's NVFP4QTensor; its fake quantization of NVFP4 needs a GPU."""
    from modelopt.torch.export.quant_utils import process_layer_quant_config
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    dense = weight(24, 96, torch.float32)
    stored, scale, double = NVFP4QTensor.quantize(dense, 16)
    module = "model.layers.0.mlp.up_proj"
    tensors = {"weight": stored._quantized_data, "weight_scale": scale, "weight_scale_2": double}
    tensors["input_scale"] = torch.tensor(0.0021)
    described = process_layer_quant_config(
        {
            f"{module}.quantization": "nvfp4",
            f"{module}.awq_block_size": 16,
            "lm_head.quantization": None,
            "lm_head.awq_block_size": 0,
        }
    )
    described["kv_cache_quant_algo"] = "FP8"
    return Vector(
        {"producer": {"name": "modelopt", "version": version("nvidia-modelopt")}, "quantization": described},
        prefixed(module, tensors),
        {module: stored.dequantize(torch.float32, scale=scale, double_scale=double, block_sizes={-1: 16})},
        f"nvidia-modelopt {version('nvidia-modelopt')}, NVFP4QTensor",
        file="hf_quant_config.json",
    )


def _torchao(name: str, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        import torchao.quantization as quantization

        given = {key: value() if callable(value) else value for key, value in options.items()}
        return getattr(quantization, name)(**given)

    return make


def _granularity(name: str, *args: Any) -> Callable[[], Any]:
    def make() -> Any:
        import torchao.quantization as quantization

        return getattr(quantization, name)(*args)

    return make


_INT = {"type": "int"}
_INT4 = torch.int4  # type: ignore[attr-defined]
_FLOAT = {"type": "float", "num_bits": 8}
_GROUP = {"strategy": "group", "group_size": 32}
_TOKEN = {"num_bits": 8, "strategy": "token", "dynamic": True}
_NVFP4 = {"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16}

VECTORS: dict[str, Callable[[], Vector]] = {
    "ct-w4a16": lambda: compressed(24, 96, "pack-quantized", {**_INT, "num_bits": 4, **_GROUP}),
    "ct-w4a16-odd": lambda: compressed(5, 42, "pack-quantized", {**_INT, "num_bits": 4, "strategy": "channel"}),
    "ct-w4a16-asym": lambda: compressed(
        13, 96, "pack-quantized", {**_INT, "num_bits": 4, "symmetric": False, **_GROUP}
    ),
    "ct-w8a16": lambda: compressed(7, 42, "pack-quantized", {**_INT, "num_bits": 8, "strategy": "channel"}),
    "ct-w8a16-asym": lambda: compressed(
        13, 64, "pack-quantized", {**_INT, "num_bits": 8, "symmetric": False, **_GROUP}
    ),
    "ct-actorder": act_order,
    "ct-w8a8": lambda: compressed(
        24, 42, "int-quantized", {**_INT, "strategy": "channel"}, input_activations={**_INT, **_TOKEN}
    ),
    "ct-w8a8-static": lambda: compressed(
        24, 42, "int-quantized", {**_INT, "strategy": "tensor"}, input_activations={**_INT, "strategy": "tensor"}
    ),
    "ct-w8-naive": lambda: compressed(24, 64, "naive-quantized", {**_INT, "symmetric": False, **_GROUP}),
    "ct-fp8": lambda: compressed(
        24, 42, "float-quantized", {**_FLOAT, "strategy": "channel"}, input_activations={**_FLOAT, **_TOKEN}
    ),
    "ct-fp8-static": lambda: compressed(
        24, 42, "float-quantized", {**_FLOAT, "strategy": "tensor"}, input_activations={**_FLOAT, "strategy": "tensor"}
    ),
    "ct-fp8-block": lambda: compressed(
        20, 70, "float-quantized", {**_FLOAT, "strategy": "block", "block_structure": [16, 32]}
    ),
    "ct-nvfp4": lambda: compressed(
        24, 96, "nvfp4-pack-quantized", _NVFP4, input_activations={**_NVFP4, "dynamic": "local"}
    ),
    "ct-nvfp4a16": lambda: compressed(5, 48, "nvfp4-pack-quantized", _NVFP4),
    "ct-mxfp4": lambda: compressed(
        5, 64, "mxfp4-pack-quantized", {"type": "float", "num_bits": 4, "scale_dtype": "torch.uint8", **_GROUP}
    ),
    "fp8-block": lambda: fp8_blocks(40, 72, (16, 32)),
    "fp8-tensor": lambda: fp8_blocks(24, 42, None),
    "fbgemm": fbgemm,
    "mxfp4": mxfp4,
    "awq": awq,
    "gptq": lambda: gptq(24, 96, 4, 32, symmetric=True, desc_act=False, v1=True),
    "gptq-desc-act": lambda: gptq(24, 96, 4, 32, symmetric=True, desc_act=True, v1=True),
    "gptq-v2-asym": lambda: gptq(24, 96, 4, 32, symmetric=False, desc_act=True, v1=False),
    "gptq-v1-asym": lambda: gptq(24, 96, 4, 32, symmetric=False, desc_act=False, v1=True),
    "gptq-8bit": lambda: gptq(16, 96, 8, -1, symmetric=False, desc_act=False, v1=True),
    "gptq-short-group": lambda: gptq(16, 80, 4, 32, symmetric=False, desc_act=False, v1=False),
    "bnb-nf4": lambda: bitsandbytes_4bit(24, 128, "nf4", double=False),
    "bnb-nf4-double": lambda: bitsandbytes_4bit(150, 64, "nf4", double=True, block=32),
    "bnb-nf4-odd": lambda: bitsandbytes_4bit(7, 99, "nf4", double=False),
    "bnb-fp4": lambda: bitsandbytes_4bit(8, 128, "fp4", double=False, block=128),
    "bnb-int8": bitsandbytes_8bit,
    "torchao-float8": lambda: torchao(_torchao("Float8WeightOnlyConfig")),
    "torchao-float8-dynamic": torchao_dynamic,
    "torchao-int8": lambda: torchao(_torchao("Int8WeightOnlyConfig")),
    "torchao-int8-dynamic": lambda: torchao(_torchao("Int8DynamicActivationInt8WeightConfig")),
    "torchao-intx": lambda: torchao(
        _torchao("IntxWeightOnlyConfig", weight_dtype=_INT4, granularity=_granularity("PerGroup", 32))
    ),
    "torchao-int4": torchao_int4,
    "modelopt-fp8": lambda: modelopt("FP8_DEFAULT_CFG"),
    "modelopt-nvfp4": modelopt_nvfp4,
    "modelopt-int4-awq": lambda: modelopt("INT4_AWQ_CFG"),
    "modelopt-int8": lambda: modelopt("INT8_SMOOTHQUANT_CFG"),
}


def main() -> None:
    """Write the vectors named on the command line, or all."""
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[2:] or VECTORS:
        vector = VECTORS[name]()
        expected = prefixed("expected", vector.expected)
        metadata = {
            "config": json.dumps(vector.config),
            "file": vector.file,
            "library": vector.library,
            "torch": torch.__version__,
            **vector.header,
        }
        path = directory / f"{name}.safetensors"
        tensors = {**vector.tensors, **expected}
        save_file({key: tensor.detach().contiguous() for key, tensor in tensors.items()}, path, metadata)
        print(f"{name}: {path.stat().st_size} bytes, {vector.library}")


if __name__ == "__main__":
    main()
