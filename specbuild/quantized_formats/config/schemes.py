"""What a checkpoint says of its quantized weights, and the weights as it says.

``read_scheme`` reads ``quantization_config`` of config.json, or ModelOpt's hf_quant_config.json. All of it was written
by somebody else and is checked.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from specbuild.files import read_json
from specbuild.quantized_formats.config import methods
from specbuild.quantized_formats.config.compressed_tensors import compressed_tensors
from specbuild.quantized_formats.config.config_section import UNQUANTIZED, Section, shown
from specbuild.quantized_formats.config.modelopt import modelopt
from specbuild.quantized_formats.config.refused import REFUSED
from specbuild.quantized_formats.config.scheme import Scheme
from specrun.errors import CheckpointError, UnsupportedModelError

METHODS = {
    "awq": methods.awq,
    "bitsandbytes": methods.bitsandbytes,
    "compressed-tensors": compressed_tensors,
    "fbgemm_fp8": methods.fbgemm_fp8,
    "fp8": methods.fp8,
    "gguf": methods.gguf,
    "gptq": methods.gptq,
    "modelopt": modelopt,
    "mxfp4": methods.mxfp4,
    "mxfp8": methods.fp8,
    "torchao": methods.torchao,
}


def read_scheme(directory: Path, config_json: dict[str, Any]) -> Scheme | None:
    """What config.json, or hf_quant_config.json in the same directory, says of quantized weights. None: there are none.

    Raises CheckpointError; UnsupportedModelError names a method that is not read, and what to do.
    """
    path = directory / "config.json"
    for key in ("quantization_config", "compression_config"):
        if values := config_json.get(key):
            return _scheme(directory, path, key, values)
    path = directory / "hf_quant_config.json"
    if path.is_file():
        values = read_json(path).get("quantization")
        if not isinstance(values, dict):
            raise CheckpointError(f"{path}: 'quantization' {shown(values)}: expected an object; download it again")
        return modelopt(Section(path, "quantization", values))
    if isinstance(values := config_json.get("quantization"), dict) and "bits" in values:
        raise UnsupportedModelError(f"{directory / 'config.json'}: weights are quantized ({REFUSED['mlx']})")
    return None


def require_dense(directory: Path, advice: str) -> None:
    """Raise UnsupportedModelError, with ``advice``, where the checkpoint's weights are quantized already."""
    path = directory / "config.json"
    if path.is_file() and (scheme := read_scheme(directory, read_json(path))):
        raise UnsupportedModelError(f"{scheme.path}: weights are quantized already ({scheme.method}); {advice}")


def _scheme(directory: Path, path: Path, key: str, values: object) -> Scheme:
    if not isinstance(values, dict):
        raise CheckpointError(f"{path}: {key} {shown(values)}: expected an object; download it again")
    section = Section(path, key, values)
    method = _method(section)
    if method in METHODS:
        return METHODS[method](section)
    if method in REFUSED:
        raise UnsupportedModelError(f"{path}: weights are quantized ({REFUSED[method]})")
    raise UnsupportedModelError(
        f"{path}: {key}.quant_method {shown(section.get('quant_method'))} is not known; specbuild reads "
        f"{', '.join(sorted(METHODS))}; {UNQUANTIZED}"
    )


def _method(section: Section) -> str:
    """The name of the method; older files do not state it."""
    if section.get("quant_method") is not None:
        return section.text("quant_method")
    if section.get("load_in_4bit") or section.get("load_in_8bit"):
        return "bitsandbytes"
    if section.get("config_groups") is not None:
        return "compressed-tensors"
    if section.get("quant_algo") is not None:
        return "modelopt"
    if section.get("bits") is not None and section.get("group_size") is not None:
        return "mlx"
    raise section.wrong("quant_method", "the name of a method")
