"""Quantize a model's dense weights by a recipe. Weights are read and rounded when they are written."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import from_torch_dtype
from torch import nn
from transformers.pytorch_utils import Conv1D

from specbuild.quantization.recipe import Recipe, Storage
from specbuild.quantization.rounding import FLOAT4_MAX, FLOAT8_MAX, CodeForm, Rounded, Rows, global_scale, round_weight
from specbuild.weights.packed import Packed
from specbuild.weights.packed_model import PackedModel, parameter_names
from specrun.errors import BuildConfigError

if TYPE_CHECKING:
    from specbuild.quantization.activation_ranges import Amax

_CODES: dict[CodeForm, ir.DataType] = {
    "int8": ir.DataType.INT8,
    "int4": ir.DataType.INT4,
    "float8": ir.DataType.FLOAT8E4M3FN,
    "float4": ir.DataType.FLOAT4E2M1,
}


def pack_model(model: Any, recipe: Recipe, weights: Mapping[str, Any], amax: Amax | None = None) -> PackedModel:
    """Quantize the weights of a transformers model.

    weights: by the parameters' names; they are read when codes are. An embedding and a head that are tied share their
    codes where both are stored alike. amax: of inputs, for recipes that need it. An expert that no token reached has
    its layer's largest one.

    Raises BuildConfigError where groups do not divide a weight, or where a weight was not used in calibration.
    """
    rounded: Any = functools.lru_cache(maxsize=1)(round_weight)  # Codes and scales are written one after the other.
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    names = parameter_names(model)
    packed = PackedModel()
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear | Conv1D | nn.Embedding) or (own := names.get(id(module.weight))) is None:
            continue
        weight = weights[own[0]]
        if isinstance(module, nn.Embedding):
            if module is embedding and (storage := recipe.embedding(name, weight.shape[1])):
                packed.tables.update(dict.fromkeys(own, _pack(weight, storage, rounded, by_row=True)))
            continue
        rows = _Columns(weight) if isinstance(module, Conv1D) else weight
        if storage := recipe.product(name, rows.shape[1], module is head):
            storage = _calibrated(storage, name, amax.inputs.get(own[0]) if amax else None)
            if (table := packed.tables.get(own[0])) and _is_stored_as(table, storage):  # They are tied.
                both = dict.fromkeys(own, replace(table, activation=storage.activation))
                packed.tables.update(both)
                packed.linears.update(both)
            else:
                squares = _squares(amax, own[0])
                packed.linears.update(dict.fromkeys(own, _pack(rows, storage, rounded, squares=squares)))
    for name, module in model.named_modules():
        for parameter in stacked_weights(module):
            stacked, weight = f"{name}.{parameter}", weights[f"{name}.{parameter}"]
            parts = [weight.row(expert) for expert in range(weight.shape[0])]
            parts = [_Columns(part) for part in parts] if module.is_transposed else parts
            if storage := recipe.product(stacked, parts[0].shape[1], is_head=False):
                reached, squares = amax.experts.get(stacked, {}) if amax else {}, _squares(amax, stacked)
                loudest = max(reached.values(), default=None)
                packed.experts[stacked] = tuple(
                    _pack(part, _calibrated(storage, stacked, reached.get(expert, loudest)), rounded, squares=squares)
                    for expert, part in enumerate(parts)
                )
    return packed


def stacked_weights(module: Any) -> list[str]:
    """The parameters of a module of transformers that holds stacked experts; of another module none."""
    names = ("gate_up_proj", "up_proj", "down_proj") if hasattr(module, "is_transposed") else ()
    return [
        name for name in names if isinstance(weight := getattr(module, name, None), nn.Parameter) and weight.ndim == 3
    ]


def unmatched(model: Any, recipe: Recipe) -> list[str]:
    """The patterns of ``--exclude`` that mean no module of the model."""
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D | nn.Embedding)]
    names += [f"{name}.{own}" for name, module in model.named_modules() for own in stacked_weights(module)]
    return [pattern for pattern in recipe.exclude if not fnmatch.filter(names, pattern)]


def _calibrated(storage: Storage, module: str, amax: float | None) -> Storage:
    """``storage`` with the scale of its input, where that is fixed."""
    if storage.activation is None or storage.activation.form == "int8":
        return storage
    if amax is None:
        raise BuildConfigError(f"{module}: is not used on the text of --calib_dataset: give --exclude {module}")
    steps = FLOAT8_MAX * (FLOAT4_MAX if storage.activation.form == "float4" else 1)
    scale = amax / steps or 1.0
    return replace(storage, activation=replace(storage.activation, scale=scale))


def _is_stored_as(table: Packed, storage: Storage) -> bool:
    """Whether the weight of a linear layer may be a quantized embedding's table."""
    return table.codes.dtype == _CODES[storage.form] and table.block == storage.block


def _squares(amax: Amax | None, name: str) -> torch.Tensor | None:
    """Those of a linear layer's inputs; None where no text was read, or none reached it."""
    found = amax.squares.get(name) if amax else None
    return torch.from_numpy(found.copy()) if found is not None and found.any() else None


class _Columns:
    """The rows of a transposed matrix, for modules that keep their weight as [K, N]."""

    def __init__(self, weight: Any) -> None:
        self.weight, self.dtype = weight, weight.dtype
        self.shape = (weight.shape[1], weight.shape[0])

    def __getitem__(self, rows: slice) -> torch.Tensor:
        columns: torch.Tensor = self.weight[:, rows]
        return columns.T


_Rounding = Callable[[Rows, CodeForm, int, torch.Tensor | None], Rounded]


def _pack(
    weight: Any, storage: Storage, rounded: _Rounding, by_row: bool = False, squares: torch.Tensor | None = None
) -> Packed:
    """weight [N, K] -> codes [K, N]; or, by_row, [N, K] for a table whose rows are looked up."""
    channels, inputs = weight.shape
    block = storage.block or inputs
    codes_type, scale_type = _CODES[storage.form], from_torch_dtype(weight.dtype)

    kept: list[Any] = []  # Scales of codes that were written: those of all experts follow the codes of all.

    def turned(values: Any) -> Any:
        return np.ascontiguousarray(values.T) if by_row else values

    def codes() -> ir.TensorProtocol:
        found = rounded(weight, storage.form, block, squares)
        kept[:] = [found.scales]
        return ir.Tensor(turned(found.codes), dtype=codes_type)

    def scales() -> ir.TensorProtocol:
        found = kept.pop() if kept else rounded(weight, storage.form, block, squares).scales
        return ir.Tensor(turned(found) if storage.block else found[0])

    def unit() -> ir.TensorProtocol:
        return ir.Tensor(np.asarray(global_scale(weight), scale_type.numpy()))

    is_float4 = storage.form == "float4"
    sizes = [channels, inputs // block] if by_row else [inputs // block, channels]
    scale_shape = ir.Shape(sizes if storage.block else [channels])
    return Packed(
        codes=ir.LazyTensor(codes, codes_type, ir.Shape([channels, inputs] if by_row else [inputs, channels])),
        scales=ir.LazyTensor(scales, ir.DataType.FLOAT8E4M3FN if is_float4 else scale_type, scale_shape),
        block=storage.block,
        axis=0 if by_row else 1,
        global_scale=ir.LazyTensor(unit, scale_type, ir.Shape([])) if is_float4 else None,
        activation=storage.activation,
    )
