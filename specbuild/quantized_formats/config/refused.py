"""Quantized formats that are recognized and not read. ``hf.unsupported`` finds GGUF files and adapters."""

from __future__ import annotations

_ORIGINAL = "give the checkpoint as it was before quantization"
_CODEBOOK = f"codebooks of several values at once, which no backend multiplies; {_ORIGINAL}"
_OWN_KERNEL = f"laid out for kernels of its own; {_ORIGINAL}"
_CUSTOM = f"a layout that specbuild does not read; {_ORIGINAL}, or one of its checkpoints in FP8, AWQ or GPTQ"

REFUSED = {
    "aqlm": f"AQLM: {_CODEBOOK}",
    "auto-round": "AutoRound's own layout; export it with AutoRound in format auto_gptq, auto_awq or llm_compressor",
    "bitblas": f"BitBLAS: {_OWN_KERNEL}",
    "bitnet": f"BitNet: weights of three values, which no backend multiplies; {_ORIGINAL}",
    "deepspeedfp": f"DeepSpeed FP: {_CUSTOM}",
    "eetq": f"EETQ: {_OWN_KERNEL}",
    "exl2": f"EXL2: {_OWN_KERNEL}",
    "exl3": f"EXL3: {_OWN_KERNEL}",
    "experts_int8": f"experts_int8: {_CUSTOM}",
    "fouroversix": f"Four Over Six: {_CUSTOM}",
    "fp_quant": f"FP-Quant: its inputs are rotated by a Hadamard matrix; {_ORIGINAL}",
    "gemma": f"Gemma's own layout; {_ORIGINAL}",
    "gptq_marlin": f"GPTQ in Marlin's layout: {_OWN_KERNEL}, or the GPTQ checkpoint before it was repacked",
    "higgs": f"HIGGS: {_CODEBOOK}",
    "hqq": f"HQQ: {_CUSTOM}",
    "ipex": f"Intel's IPEX: {_OWN_KERNEL}",
    "marlin": f"Marlin: {_OWN_KERNEL}, or the GPTQ checkpoint before it was repacked",
    "metal": f"Metal: {_CUSTOM}",
    "mlx": f"MLX: {_CUSTOM}",
    "nvfp4": "transformers' own NVFP4; quantize with ModelOpt or llm-compressor, whose NVFP4 checkpoints are read",
    "qqq": f"QQQ: {_OWN_KERNEL}",
    "quanto": f"Quanto: {_CUSTOM}",
    "quark": f"AMD Quark: {_CUSTOM}",
    "quip": f"QuIP: {_CODEBOOK}",
    "quip_sharp": f"QuIP#: {_CODEBOOK}",
    "sinq": f"SINQ: {_CUSTOM}",
    "spqr": f"SpQR: weights with outliers kept apart, which no backend multiplies; {_ORIGINAL}",
    "vptq": f"VPTQ: {_CODEBOOK}",
}
"""The method's name in ``quantization_config``: what it is, and what to do."""
