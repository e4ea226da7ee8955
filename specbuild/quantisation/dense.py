"""Quantise the dense weights of an exported graph by a recipe. Weights are read and rounded when they are written."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import onnx_ir as ir
import torch
from torch import nn

from specbuild.quantisation.attach import products, quantise_embedding, quantise_product
from specbuild.quantisation.packed import Packed
from specbuild.quantisation.recipe import Recipe, Storage
from specbuild.quantisation.rounding import CodeForm, Rounded, global_scale, round_weight

PREFIX = "model."
"""The exporter puts it in front of parameters' names."""
_CODES: dict[CodeForm, ir.DataType] = {
    "int8": ir.DataType.INT8,
    "int4": ir.DataType.INT4,
    "float8": ir.DataType.FLOAT8E4M3FN,
    "float4": ir.DataType.FLOAT4E2M1,
}


class Ends(NamedTuple):
    """A model's first and last module with weights, by name. Their parameter may be one (tied), under either name."""

    embedding: str
    head: str
    embedding_parameters: frozenset[str]
    head_parameters: frozenset[str]


def ends(model: Any) -> Ends:
    """The ends of a transformers model."""
    first, last = model.get_input_embeddings(), model.get_output_embeddings()
    modules = {id(module): name for name, module in model.named_modules()}

    def parameters(of: nn.Module) -> frozenset[str]:
        named = model.named_parameters(remove_duplicate=False)
        return frozenset(name for name, parameter in named if parameter is of.weight)

    return Ends(modules[id(first)], modules[id(last)], parameters(first), parameters(last))


def quantise(model: ir.Model, recipe: Recipe, names: Ends) -> dict[str, Packed]:
    """Quantise ``model``, as the exporter leaves it, in place. Returns the packed weights by the modules' names.

    An embedding and a head that are tied get a copy each. Raises BuildConfigError where blocks do not divide a weight.
    """
    packed: dict[str, Packed] = {}
    rounded = functools.lru_cache(maxsize=1)(_round)  # Codes and scales are written one after the other.
    # Found before anything changes: a tied weight vanishes with its last reader.
    gathers = [node for node in model.graph if node.op_type == "Gather" and node.inputs[0] is not None]
    for product in products(model):
        parameter = str(product.weight.name).removeprefix(PREFIX)
        is_head = parameter in names.head_parameters
        module = names.head if is_head else parameter.rpartition(".")[0]
        weight = _weight(product.weight, product.transposed)
        if storage := recipe.product(module, weight.shape[1], is_head):
            packed[module] = _pack(weight, storage, rounded)
            quantise_product(model, product, packed[module])
    for gather in gathers:
        table = gather.inputs[0]
        known = table is not None and str(table.name).removeprefix(PREFIX) in names.embedding_parameters
        if known and table is not None and (storage := recipe.embedding(names.embedding)):
            rows = _pack(_weight(table, transposed=True), storage, rounded, by_row=True)
            packed[names.embedding] = rows
            quantise_embedding(model, gather, rows)
    return packed


class _Weight(NamedTuple):
    shape: tuple[int, int]
    """[N, K]"""
    dtype: ir.DataType
    read: Callable[[], torch.Tensor]


_Rounding = Callable[[_Weight, CodeForm, int], Rounded]


def _weight(value: ir.Value, transposed: bool) -> _Weight:
    """An initializer as modules keep weights. transposed: it stands so in the graph."""
    tensor = value.const_value
    if tensor is None:
        raise ValueError(f"{value.name}: without a tensor")
    rows, columns = (int(size) for size in tensor.shape)  # type: ignore[arg-type]
    if transposed:
        return _Weight((rows, columns), tensor.dtype, lambda: as_torch(tensor))
    return _Weight((columns, rows), tensor.dtype, lambda: as_torch(tensor).T)


def as_torch(tensor: ir.TensorProtocol) -> torch.Tensor:
    """The values of ``tensor``, without a copy where that is possible."""
    array = np.asarray(tensor.numpy())
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _round(weight: _Weight, form: CodeForm, block: int) -> Rounded:
    return round_weight(weight.read(), form, block)


def _pack(weight: _Weight, storage: Storage, rounded: _Rounding, by_row: bool = False) -> Packed:
    """by_row: codes [N, K] for a table whose rows are looked up; else [K, N] for a product."""
    channels, inputs = weight.shape
    block = storage.block or inputs
    kind = _CODES[storage.form]

    def codes() -> ir.TensorProtocol:
        found = rounded(weight, storage.form, block).codes
        return ir.Tensor(np.ascontiguousarray(found.T if by_row else found), dtype=kind)

    def scales() -> ir.TensorProtocol:
        found = rounded(weight, storage.form, block).scales
        return ir.Tensor(found if storage.block else found[0])

    def unit() -> ir.TensorProtocol:
        return ir.Tensor(np.asarray(global_scale(weight.read()), weight.dtype.numpy()))

    is_float4 = storage.form == "float4"
    return Packed(
        codes=ir.LazyTensor(codes, kind, ir.Shape([channels, inputs] if by_row else [inputs, channels])),
        scales=ir.LazyTensor(
            scales,
            ir.DataType.FLOAT8E4M3FN if is_float4 else weight.dtype,
            ir.Shape([inputs // block, channels] if storage.block else [channels]),
        ),
        block=storage.block,
        axis=0 if by_row else 1,
        global_scale=ir.LazyTensor(unit, weight.dtype, ir.Shape([])) if is_float4 else None,
        activation=storage.activation,
    )
