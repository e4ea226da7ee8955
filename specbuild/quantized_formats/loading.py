"""Quantized weights of a checkpoint as tensors that can be read like dense ones, for transformers' own loading."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx_ir as ir
from torch import nn
from transformers.pytorch_utils import Conv1D

from specbuild.quantized_formats.config.scheme import Scheme
from specbuild.quantized_formats.from_torch import FromTorch
from specbuild.weights.lazy_tensors import Reader, Stacked, StoredTensor, Weight
from specbuild.weights.packed import Packed, shared_activation, side_by_side
from specbuild.weights.packed_model import PackedModel, PackedReader, parameter_names
from specbuild.weights.weight_map import Converted
from specrun.errors import CheckpointError, UnsupportedModelError


def with_packed(scheme: Scheme, stored: Mapping[str, Reader]) -> dict[str, Reader]:
    """The tensors of a checkpoint, where codes, scales and so on of a module are one ``weight``.

    Raises CheckpointError where tensors contradict the configuration or each other.
    """
    scheme.require_quantized(stored)
    modules: dict[str, dict[str, FromTorch]] = {}
    for name, tensor in stored.items():
        if parts := scheme.split(name):
            modules.setdefault(parts[0], {})[parts[1]] = FromTorch(name, tensor)
    readers = dict(stored)
    for module, named_tensors in modules.items():
        tensors: dict[str, Any] = dict(named_tensors)  # FromTorch is a StoredTensor of the readers.
        if not scheme.is_quantized(tensors):
            continue
        for suffixed in named_tensors.values():
            del readers[suffixed.name]
        if "blocks" in tensors:
            experts = scheme.experts(module, tensors)
            readers[module] = Stacked(tuple(PackedReader(expert) for expert in experts), is_transposed=True)
        elif packed := scheme.packed(module, tensors):
            readers[f"{module}.weight"] = PackedReader(packed)
    return readers


def packed_linears(model: Any, scheme: Scheme, weights: Mapping[str, Weight], notes: list[str]) -> PackedModel:
    """The linear layers of ``model`` whose weights the checkpoint holds in few bits.

    ``notes`` gets sentences for people. What else is quantized (embeddings, say) is dequantized when it is written.
    """
    packed_model = PackedModel()
    embedding, names = model.get_input_embeddings(), parameter_names(model)
    table = weights.get(names[id(embedding.weight)][0])
    if table is not None and isinstance(table.reader, PackedReader) and table.reader.packed.axis == 0:
        packed_model.tables.update(dict.fromkeys(names[id(embedding.weight)], table.reader.packed))
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear | Conv1D) or (weight := weights.get(f"{name}.weight")) is None:
            continue
        if not isinstance(weight.reader, PackedReader):
            if scheme.strict and weight.name == f"{name}.weight" and scheme.form(name) is not None:
                raise CheckpointError(
                    f"{scheme.path}: {name} is said to be quantized, and its weight is dense; download both again"
                )
            continue
        if isinstance(module, Conv1D):
            raise UnsupportedModelError(f"{scheme.path}: {name}: quantized weights of Conv1D modules are not read")
        packed_model.linears[f"{name}.weight"] = _attachable(weight.reader.packed, notes)
    for name, weight in weights.items():
        if experts := _experts(weight.reader, notes):
            packed_model.experts[name] = experts
    notes += scheme.notes
    return packed_model


def _experts(reader: Reader, notes: list[str]) -> tuple[Packed, ...]:
    """The weights of stacked experts, whose formats must be the same; nothing where they stay dense."""
    sources = reader.experts() if isinstance(reader, Converted | Stacked) else []
    parts = [[readers.packed for readers in packed if isinstance(readers, PackedReader)] for packed in sources]
    if not any(parts):
        return ()
    alike = [[replace(packed, activation=shared_activation(readers)) for packed in readers] for readers in parts]
    joined = [
        side_by_side(readers) if len(readers) == len(packed) else None
        for readers, packed in zip(alike, sources, strict=True)
    ]
    experts = tuple(_attachable(packed, notes) for packed in joined if packed is not None)
    forms = {
        (packed.codes.dtype, packed.scales.dtype, packed.block, packed.axis, packed.zero_points is None)
        for packed in experts
    }
    if len(experts) == len(sources) and len(forms) == 1 and not any(packed.has_extras for packed in experts):
        return experts
    note = "experts are dequantized: their codes do not fit into one tensor"
    if note not in notes:
        notes.append(note)
    return ()


def _attachable(packed: Packed, notes: list[str]) -> Packed:
    """``packed`` without what TensorRT does not compile; that is no less exact, and said."""
    activation = packed.activation
    form = activation and activation.form
    if form == "float4" and activation and activation.scale and packed.codes.dtype == ir.DataType.FLOAT4E2M1:
        return packed
    if form != "float4" and not (form == "float8" and packed.block):
        return packed
    where = " of linear layers whose weights have groups" if form == "float8" else ""
    note = f"inputs in {form}{where} keep their precision here, which is no less exact"
    if note not in notes:
        notes.append(note)
    return replace(packed, activation=None)


def require_claimed(directory: Path, weights: Mapping[str, Weight]) -> None:
    """Raise UnsupportedModelError where a weight is stored in few bits and nothing says what its codes mean."""
    for name, weight in weights.items():
        stored = weight.reader.dtype
        if isinstance(weight.reader, StoredTensor) and weight.dtype.is_floating_point and stored.itemsize == 1:
            raise UnsupportedModelError(
                f"{directory}: {name} is stored as {str(stored).removeprefix('torch.')} in a way that "
                "specbuild does not read; give the checkpoint as it was before quantization"
            )
