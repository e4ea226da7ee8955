"""Quantize a model's dense weights by a recipe. Weights are read and rounded when they are written."""

from __future__ import annotations

import fnmatch
import functools
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import torch
from onnx_ir.tensor_adapters import from_torch_dtype
from torch import nn
from transformers.pytorch_utils import Conv1D

from specbuild.files import write_whole
from specbuild.quantization.gptq import KeptInputs, LinearInputs
from specbuild.quantization.recipe import Recipe, Storage
from specbuild.quantization.rounding import FLOAT4_MAX, FLOAT8_MAX, CodeForm, Rounded, global_scale, round_weight
from specbuild.weights.packed import Packed, lazy
from specbuild.weights.packed_model import PackedModel, parameter_names
from specrun.errors import BuildConfigError

if TYPE_CHECKING:
    from specbuild.quantization.activation_ranges import Amax

_CODES: dict[CodeForm, ir.DataType] = {
    "int8": ir.DataType.INT8,
    "int4": ir.DataType.INT4,
    "uint4": ir.DataType.UINT4,
    "float8": ir.DataType.FLOAT8E4M3FN,
    "float4": ir.DataType.FLOAT4E2M1,
}

_SCALES: dict[CodeForm, ir.DataType] = {"float4": ir.DataType.FLOAT8E4M3FN, "uint4": ir.DataType.INT8}
"""The type of scales that are codes themselves."""


def pack_model(
    model: Any, recipe: Recipe, weights: Mapping[str, Any], amax: Amax | None = None, kept: KeptInputs | None = None
) -> PackedModel:
    """Quantize the weights of a transformers model.

    weights: by the parameters' names; they are read when codes are. An embedding and a head that are tied share their
    codes where both are stored alike. amax: of inputs, for recipes that need it. An expert that no token reached has
    its layer's largest one. kept: inputs of linear layers, for recipes that round by them.

    Raises BuildConfigError where groups do not divide a weight, or where a weight was not used in calibration.
    """
    last: Any = functools.lru_cache(maxsize=1)(_round)  # Codes and scales are written one after the other.
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    names = parameter_names(model)
    packed = PackedModel()
    for name, module in model.named_modules():
        if (
            not isinstance(module, nn.Linear | Conv1D | nn.Embedding)
            or (parameters := names.get(id(module.weight))) is None
        ):
            continue
        weight = weights[parameters[0]]
        if isinstance(module, nn.Embedding):
            if module is embedding and (storage := recipe.embedding(name, weight.shape[1])):
                packed.tables.update(dict.fromkeys(parameters, _pack(_Rounding(weight, storage, by_row=True), last)))
            continue
        rows = _Columns(weight) if isinstance(module, Conv1D) else weight
        if storage := recipe.product(name, rows.shape[1], module is head):
            storage = _calibrated(storage, name, amax.inputs.get(parameters[0]) if amax else None)
            table = packed.tables.get(parameters[0])
            if table and (table.codes.dtype, table.block) == (_CODES[storage.form], storage.block):  # They are tied.
                both = dict.fromkeys(parameters, replace(table, activation=storage.activation))
                packed.tables.update(both)
                packed.linears.update(both)
            else:
                inputs = kept.of(parameters[0]) if kept else None
                rounding = _Rounding(rows, storage, _squares(amax, parameters[0]), inputs)
                packed.linears.update(dict.fromkeys(parameters, _pack(rounding, last)))
    for name, module in model.named_modules():
        for parameter in stacked_weights(module):
            stacked, weight = f"{name}.{parameter}", weights[f"{name}.{parameter}"]
            parts = [weight.row(expert) for expert in range(weight.shape[0])]
            parts = [_Columns(part) for part in parts] if module.is_transposed else parts
            if storage := recipe.product(stacked, parts[0].shape[1], is_head=False):
                storage = replace(storage, form="int4") if storage.form == "uint4" else storage
                reached, squares = amax.experts.get(stacked, {}) if amax else {}, _squares(amax, stacked)
                loudest = max(reached.values(), default=None)
                packed.experts[stacked] = tuple(
                    _pack(_Rounding(part, _calibrated(storage, stacked, reached.get(expert, loudest)), squares), last)
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
    names += [f"{name}.{parameter}" for name, module in model.named_modules() for parameter in stacked_weights(module)]
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


def _squares(amax: Amax | None, name: str) -> torch.Tensor | None:
    """Those of a linear layer's inputs; None where no text was read, or none reached it."""
    squares = amax.squares.get(name) if amax else None
    return torch.from_numpy(squares.copy()) if squares is not None and squares.any() else None


class _Columns:
    """The rows of a transposed matrix, for modules that keep their weight as [K, N]."""

    def __init__(self, weight: Any) -> None:
        self.weight, self.dtype = weight, weight.dtype
        self.shape = (weight.shape[1], weight.shape[0])

    def __getitem__(self, rows: slice) -> torch.Tensor:
        columns: torch.Tensor = self.weight[:, rows]
        return columns.T


@dataclass(frozen=True, eq=False)
class _Rounding:
    """How a weight is rounded, once it is read."""

    weight: Any
    """[N, K]"""
    storage: Storage
    squares: torch.Tensor | None = None
    """[K], of its inputs."""
    inputs: LinearInputs | None = None
    by_row: bool = False
    """True for a table, whose rows are looked up."""

    @property
    def block(self) -> int:
        """Input channels that share a scale."""
        return self.storage.block or int(self.weight.shape[1])


def _round(rounding: _Rounding) -> Rounded:
    """Codes [K, N] and scales [K / block, N]; of a table [N, K] and [N, K / block]."""
    form = rounding.storage.form
    inputs = rounding.inputs if form in ("int4", "uint4") else None

    def make() -> Rounded:
        return round_weight(rounding.weight, form, rounding.block, rounding.squares, inputs)

    result = make() if inputs is None else _once(inputs.rounded, make)
    if not rounding.by_row:
        return result
    return Rounded(np.ascontiguousarray(result.codes.T), np.ascontiguousarray(result.scales.T))


def _once(path: Path, make: Callable[[], Rounded]) -> Rounded:
    """What ``make`` gives. GPTQ takes long, and a weight is read to compare it and to write it: a file has it then."""
    if path.exists():
        with np.load(path) as kept:
            kinds = {name: kept[f"{name}.dtype"].item() for name in Rounded._fields if name in kept}
            return Rounded(**{name: kept[name].view(getattr(ml_dtypes, kind, kind)) for name, kind in kinds.items()})
    result, content, parts = make(), io.BytesIO(), dict[str, npt.NDArray[Any]]()
    for name, part in result._asdict().items():
        if part is not None:  # numpy's files do not know the types of ml_dtypes.
            parts |= {name: part.view(f"u{part.itemsize}"), f"{name}.dtype": np.array(part.dtype.name)}
    np.savez(content, **parts)  # type: ignore[arg-type]
    write_whole(path, content.getbuffer())
    return result


def _pack(rounding: _Rounding, rounded: Callable[[_Rounding], Rounded]) -> Packed:
    """weight [N, K] -> codes [K, N]; of a table [N, K]. They are made when they are asked for."""
    weight, storage, by_row = rounding.weight, rounding.storage, rounding.by_row
    channels, inputs = weight.shape
    codes_type, scale_type = _CODES[storage.form], from_torch_dtype(weight.dtype)
    sizes = [channels, inputs // rounding.block] if by_row else [inputs // rounding.block, channels]
    scale_shape = sizes if storage.block else [channels]
    left: dict[str, Any] = {}  # Beside codes that were written: the scales of all experts follow the codes of all.

    def codes() -> ir.TensorProtocol:
        result = rounded(rounding)
        left.update(result._asdict(), codes=None)
        return ir.Tensor(result.codes, dtype=codes_type)

    def part(name: str, dtype: ir.DataType, shape: list[int]) -> ir.LazyTensor:
        def read() -> npt.NDArray[Any]:
            array = left.pop(name) if name in left else getattr(rounded(rounding), name)
            return array.reshape(shape)  # type: ignore[no-any-return]

        return lazy(dtype, shape, read)

    packed = Packed(
        codes=ir.LazyTensor(codes, codes_type, ir.Shape([channels, inputs] if by_row else [inputs, channels])),
        scales=part("scales", _SCALES.get(storage.form, scale_type), scale_shape),
        block=storage.block,
        axis=0 if by_row else 1,
        activation=storage.activation,
    )
    if storage.form == "float4":
        unit = lazy(scale_type, [], lambda: np.asarray(global_scale(weight), scale_type.numpy()))
        return replace(packed, scale_units=unit)
    if storage.form != "uint4":
        return packed
    return replace(
        packed,
        scale_units=part("scale_units", ir.DataType.FLOAT, [channels]),
        offsets=part("offsets", ir.DataType.INT8, scale_shape),
        offset_units=part("offset_units", ir.DataType.FLOAT, [channels]),
    )
