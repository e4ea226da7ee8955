"""The headers of torchao's safetensors: which parameter is which of its tensor classes."""

from __future__ import annotations

import json

from specbuild.quantized_formats.config.config_section import UNQUANTIZED, Section, shown
from specbuild.quantized_formats.formats import Form
from specbuild.weights.safetensors_files import check_file
from specrun.errors import CheckpointError, UnsupportedModelError

_INTEGERS = {f"int{bits}": 4 if bits <= 4 else 8 for bits in range(1, 9)}
_LOW = "asymmetric inputs are rounded to 8 bits without a zero point here"


def weight_forms(section: Section) -> tuple[dict[str, Form], tuple[str, ...]]:
    """The form of every quantized module, and notes.

    ``section`` is torchao's ``quantization_config``; the weight files are in its directory. Raises CheckpointError;
    UnsupportedModelError names what is not read.
    """
    directory = section.path.parent
    files = sorted(directory.glob("*.safetensors"))
    entries = {name: (path, text) for path in files for name, text in check_file(path).metadata.items() if "." in name}
    forms, notes = {}, set()
    for name, (path, text) in entries.items():
        try:
            entry = json.loads(text)
        except (ValueError, TypeError, RecursionError):
            continue  # Metadata of another tool.
        kind = entry.get("_type") if isinstance(entry, dict) else None
        if kind is None or kind == "Tensor":
            continue
        data = entry.get("_data")
        if not isinstance(data, dict):
            raise CheckpointError(f"{path}: the header's entry {name!r} has no '_data'; download it again")
        if not name.endswith(".weight"):
            raise UnsupportedModelError(f"{path}: {name} is quantized, and no weight of a linear layer; {UNQUANTIZED}")
        forms[name.removesuffix(".weight")] = _form(Section(path, name, data), str(kind))
        if data.get("activation_quantization") is not None:
            notes.add(_LOW)
    if not forms:
        pickles = sorted(directory.glob("*.bin"))
        raise CheckpointError(
            f"{directory}: "
            + (f"{pickles[0].name} is pickled, which can run code when read" if pickles else "no torchao tensors in it")
            + "; save it again as safetensors with a recent transformers and torchao: model.save_pretrained(NEW_DIR)"
        )
    return forms, tuple(sorted(notes))


def _form(data: Section, kind: str) -> Form:
    if kind == "Float8Tensor":
        dynamic = data.get("act_quant_kwargs") is not None
        return Form("torchao", 0, data.pair("block_size"), activation="float8" if dynamic else None)
    if kind == "Int8Tensor":
        dynamic = data.get("act_quant_kwargs") is not None
        return Form("torchao", 8, data.pair("block_size"), activation="int8" if dynamic else None)
    if kind == "IntxUnpackedToInt8Tensor":
        target = data.section("target_dtype")
        dtype = target and target.text("_data")
        if dtype not in _INTEGERS:
            raise data.refused("target_dtype", "specbuild reads integers of up to 8 bits")
        dynamic = data.get("activation_quantization") is not None
        return Form("torchao", _INTEGERS[dtype], data.pair("block_size"), activation="int8" if dynamic else None)
    if kind == "Int4Tensor":
        activation = data.section("activation_dtype")
        float8 = activation is not None and activation.get("_data") == "float8_e4m3fn"
        return Form("torchao-int4", 4, data.pair("block_size"), activation="float8" if float8 else None)
    raise UnsupportedModelError(
        f"{data.path}: {data.key} is a {shown(kind)} of torchao, laid out for kernels of its own; specbuild reads "
        "Float8Tensor, Int8Tensor, Int4Tensor and IntxUnpackedToInt8Tensor; "
        f"{UNQUANTIZED}"
    )
