"""Quantise a model's dense weights by a recipe. Weights are read and rounded when they are written."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import from_torch_dtype
from torch import nn
from transformers.pytorch_utils import Conv1D

from specbuild.quantisation.inputs import FLOAT8_MAX, Inputs
from specbuild.quantisation.packed import Packed
from specbuild.quantisation.packed_model import PackedModel, parameter_names
from specbuild.quantisation.recipe import Recipe, Storage
from specbuild.quantisation.rounding import CodeForm, Rounded, Rows, global_scale, round_weight
from specrun.errors import BuildConfigError

_CODES: dict[CodeForm, ir.DataType] = {
    "int8": ir.DataType.INT8,
    "int4": ir.DataType.INT4,
    "float8": ir.DataType.FLOAT8E4M3FN,
    "float4": ir.DataType.FLOAT4E2M1,
}


def pack_model(
    model: Any, recipe: Recipe, weights: Mapping[str, Any], inputs: Mapping[str, Inputs] | None = None
) -> PackedModel:
    """Quantise the weights of a transformers model.

    weights: by the parameters' names, tensors or what is sliced like them; they are read when codes are. An embedding
    and a head that are tied get codes of their own. inputs: what ``calibrate`` found, for recipes that need it.

    Raises BuildConfigError where groups do not divide a weight, or where a weight was not used in calibration.
    """
    rounded: Any = functools.lru_cache(maxsize=1)(round_weight)  # Codes and scales are written one after the other.
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    names = parameter_names(model)
    packed = PackedModel({}, {})
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear | Conv1D | nn.Embedding) or (own := names.get(id(module.weight))) is None:
            continue
        weight = weights[own[0]]
        if isinstance(module, nn.Embedding):
            if module is embedding and (storage := recipe.embedding(name)):
                packed.tables.update(dict.fromkeys(own, _pack(weight, storage, rounded, by_row=True)))
            continue
        rows = _Columns(weight) if isinstance(module, Conv1D) else weight
        if storage := recipe.product(name, rows.shape[1], module is head):
            storage = _calibrated(storage, name, (inputs or {}).get(own[0]))
            packed.products.update(dict.fromkeys(own, _pack(rows, storage, rounded)))
    return packed


def unmatched(model: Any, recipe: Recipe) -> list[str]:
    """The patterns of ``--exclude`` that mean no module of the model."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D | nn.Embedding)]
    return [pattern for pattern in recipe.exclude if not fnmatch.filter(names, pattern)]


def _calibrated(storage: Storage, module: str, inputs: Inputs | None) -> Storage:
    """``storage`` with the scale of its input, where that is fixed."""
    if storage.activation is None or storage.activation.form != "float8":
        return storage
    if inputs is None:
        raise BuildConfigError(f"{module}: is not used on the text of --calib_dataset: give --exclude {module}")
    scale = inputs.largest / FLOAT8_MAX or 1.0
    return replace(storage, activation=replace(storage.activation, scale=scale))


class _Columns:
    """The rows of a transposed matrix, for modules that keep their weight as [K, N]."""

    def __init__(self, weight: Any) -> None:
        self.weight, self.dtype = weight, weight.dtype
        self.shape = (weight.shape[1], weight.shape[0])

    def __getitem__(self, rows: slice) -> torch.Tensor:
        columns: torch.Tensor = self.weight[:, rows]
        return columns.T


_Rounding = Callable[[Rows, CodeForm, int], Rounded]


def _pack(weight: Any, storage: Storage, rounded: _Rounding, by_row: bool = False) -> Packed:
    """weight [N, K] -> codes [K, N]; or, by_row, [N, K] for a table whose rows are looked up."""
    channels, inputs = weight.shape
    block = storage.block or inputs
    codes_type, scale_type = _CODES[storage.form], from_torch_dtype(weight.dtype)

    def codes() -> ir.TensorProtocol:
        found = rounded(weight, storage.form, block).codes
        return ir.Tensor(np.ascontiguousarray(found.T if by_row else found), dtype=codes_type)

    def scales() -> ir.TensorProtocol:
        found = rounded(weight, storage.form, block).scales
        return ir.Tensor(found if storage.block else found[0])

    def unit() -> ir.TensorProtocol:
        return ir.Tensor(np.asarray(global_scale(weight), scale_type.numpy()))

    is_float4 = storage.form == "float4"
    scale_shape = ir.Shape([inputs // block, channels] if storage.block else [channels])
    return Packed(
        codes=ir.LazyTensor(codes, codes_type, ir.Shape([channels, inputs] if by_row else [inputs, channels])),
        scales=ir.LazyTensor(scales, ir.DataType.FLOAT8E4M3FN if is_float4 else scale_type, scale_shape),
        block=storage.block,
        axis=0 if by_row else 1,
        global_scale=ir.LazyTensor(unit, scale_type, ir.Shape([])) if is_float4 else None,
        activation=storage.activation,
    )
